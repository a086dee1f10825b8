"""`whorl plan show`: what a model costs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.options import StoreOption
from whorl.cli.plan import model_argument as given
from whorl.cli.text_table import print_table

if TYPE_CHECKING:
    from whorl.plan.accounting.devices import Device
    from whorl.plan.accounting.model_cost import ModelCost


def show(
    model: given.Model,
    device: given.Devices = "h100",
    context: given.Context = 2048,
    batch: given.Batch = 1,
    dtype: given.Format = "bf16",
    page: Annotated[Path | None, typer.Option(help="Write the roofline as an HTML page.")] = None,
    as_json: given.Json = False,
    store: StoreOption = None,
) -> None:
    """Show what a model costs: parameters, FLOPs and bytes, and the least time of its steps on a device.

    Cache and checkpoint are the bytes that the engine allocates and that training writes. Times are the roofline: no program
    is faster, and most are two or three times slower. With `--device here` the page has products that this machine ran.

    Examples:

        whorl plan show llama-3-8b --device h100x8 --context 8192

        whorl plan show 6x384/8192 --device here --dtype fp32 --page roofline.html
    """
    import json

    from whorl.plan.accounting.devices import HERE, parse_devices
    from whorl.plan.accounting.model_cost import ModelCost
    from whorl.recipes.steps.pretrain.roofline_page import roofline_blocks
    from whorl.report.blocks import StepReport
    from whorl.report.data import ReportData
    from whorl.report.render import render
    from whorl.store import Store

    shape, name, _ = given.find_model(model, Store(store))
    found, count = parse_devices(device)
    cost = ModelCost(shape, dtype)
    about = {"model": name, **_describe(cost, found, count, batch, context)}
    if as_json:
        print(json.dumps(about, indent=1))
    else:
        _print(about, found)
    if page is not None:
        points = _measured(cost, batch, context) if found.name == HERE else []
        report = StepReport(blocks=[*roofline_blocks(found, dtype, about["steps"], points)])
        render(ReportData(title=f"{name}: roofline", reports=[("roofline", report)]), page)


def _describe(cost: ModelCost, device: Device, count: int, rows: int, length: int) -> dict[str, Any]:
    """Return the costs of a model as JSON. Raises ConfigError: the device has no peak for the number format."""
    from whorl.engine.config import EngineConfig
    from whorl.plan.accounting.model_cost import TRAINING_BYTES, zero_bytes
    from whorl.plan.accounting.number_formats import number_format
    from whorl.plan.accounting.roofline import STEPS, operators

    parts, each = cost.parameters(), TRAINING_BYTES["fp32" if cost.dtype.itemsize == 4 else "bf16"]
    total = parts["total"]
    return {
        "device": device.name, "devices": count, "format": cost.format, "rows": rows, "length": length,
        "parameters": parts, "embedding_share": cost.embedding_share,
        "flops_per_training_token": cost.model.flops_per_token(length),
        "bytes": {
            f"weights in {cost.format}": total * number_format(cost.format).bits / 8,
            "training: weights": total * each[0], "gradients": total * each[1], "state of Adam": total * each[2],
            "activations": cost.activation_bytes(rows, length),
            "activations, recomputed": cost.activation_bytes(rows, length, recompute=True),
            "cache of the engine": cost.cache_bytes(EngineConfig.for_batch(rows, length)),
            "checkpoint": cost.checkpoint_bytes(),
        },
        "zero_bytes": [zero_bytes(total, count, stage, each) for stage in range(4)],
        "steps": {n: [one.on(device, cost.format) for one in operators(cost, n, rows, length)] for n in STEPS},
    }  # fmt: skip


def _print(about: dict[str, Any], device: Device) -> None:
    """Print the costs as tables."""
    parts, rows, length = dict(about["parameters"]), about["rows"], about["length"]
    total, active, share = parts.pop("total"), parts.pop("active"), about["embedding_share"]
    print(f"{about['model']}: {total:,} parameters, {active:,} active, embedding and head {share:.1%}\n")
    flops = Counter(dict.fromkeys(parts, 0.0))
    for one in (one for one in about["steps"]["training"] if one["flops"]):
        flops[one["part"]] += one["flops"] / (rows * length)
    table = [[part, f"{parts.get(part, 0):,}", f"{n:,.0f}"] for part, n in flops.items()]
    table.append(["total", f"{total:,}", f"{about['flops_per_training_token']:,.0f}"])
    print_table(["part", "parameters", "FLOPs of a training token"], table)
    sizes = [[what, f"{n / 1e9:,.3f}"] for what, n in about["bytes"].items()]
    print_table([f"\n{rows} x {length} positions", "GB"], sizes)
    shares = ", ".join(f"{stage}: {n / 1e9:,.2f}" for stage, n in enumerate(about["zero_bytes"]))
    print(f"ZeRO over {about['devices']}, GB of a device without activations: {shares}\n")
    lines = []
    for step, found in about["steps"].items():
        seconds, tokens = sum(one["seconds"] for one in found), rows * (1 if step == "decode" else length)
        memory = sum(one["seconds"] for one in found if one["bound"] == "memory") / seconds
        price = f"{device.price[0] / 3600 * seconds / tokens * 1e6:.3g}" if device.price else "-"
        longest = max(found, key=lambda one: float(one["seconds"]))["name"]
        lines.append([step, f"{1e3 * seconds:,.3g}", f"{memory:.0%}", price, longest])
    heads = [f"least, on one {device.name}", "ms", "bound by memory", "USD per million tokens", "longest"]
    print_table(heads, lines, left=("longest",))


def _measured(cost: ModelCost, rows: int, length: int) -> list[tuple[float, float]]:
    """Return (FLOPs per byte, FLOP/s) of the products of a training and of decode steps, timed on this CPU."""
    from whorl.machine.device_probe import probe
    from whorl.train.profiling.product_table import ProductTimes

    here, kind = probe(device="cpu"), str(cost.dtype).removeprefix("torch.")
    timed = ProductTimes(cost.config, rows, length, kind, here.threads, here.cores)
    lines = [one for one in (*timed.training(), *timed.decoding()) if one.flops and one.bytes]
    return [(one.flops / one.bytes, one.flops / one.seconds) for one in lines]
