"""`whorl plan fit`: the layouts in which a model trains on given devices."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer

from whorl.cli.options import StoreOption
from whorl.cli.plan import model_argument as given

TYPES = {"fp32": "float32", "tf32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8_e4m3": "float8"}
SHOWN = 8  # reasons of refusals


def fit(
    model: given.Model,
    device: given.Devices = "h100x8",
    context: given.Context = 2048,
    batch: given.Batch = 64,
    micro_batch: Annotated[
        int | None, typer.Option(min=1, help="Rows of a forward pass; default: all.")
    ] = None,
    dtype: given.Format = "bf16",
    as_json: given.Json = False,
    store: StoreOption = None,
) -> None:
    """List the layouts in which a model trains on these devices: step time, memory and bytes sent; and why others do not.

    Layouts are those of `whorl launch --layout`. Products are assumed to reach 40 % of the peak, and no message overlaps
    with them. For other links or rates, `--layout auto:FILE` reads a cluster (docs/parallel.md).

    Examples:

        whorl plan fit llama-3-8b --device h100x8

        whorl plan fit 12x768/50257 --device a100x4 --batch 256 --context 1024
    """
    import json

    from whorl.cli.text_table import print_table
    from whorl.errors import ConfigError, one_of
    from whorl.plan.accounting.devices import parse_devices
    from whorl.plan.layout_cost import choose_layout
    from whorl.store import Store
    from whorl.train.job import Job

    shape, name, _ = given.find_model(model, Store(store))
    found, count = parse_devices(device)
    if dtype not in TYPES:
        raise ConfigError(f"--dtype {dtype}: no training computes in it", expected=one_of(dtype, list(TYPES)))
    job = Job(
        tokens="", model=shape, dtype=TYPES[dtype], seq_len=context, batch_size=batch,
        micro_batch_size=micro_batch, steps=1,
    )  # fmt: skip
    costs, rows = choose_layout(job, found.cluster(dtype), count, must_fit=False), []
    if as_json:
        print(json.dumps([{"name": cost.name, **asdict(cost)} for cost in costs], indent=1))
        return
    for cost in (one for one in costs if not one.refused):
        speed = batch * context / cost.seconds
        price = f"{found.price[0] * count / 3600 / speed * 1e9:,.0f}" if found.price else "-"
        sizes = f"{cost.memory_bytes / 1e9:.1f}", f"{cost.sent_bytes / 1e9:.2f}"
        rows.append([cost.name, f"{cost.seconds:.3g}", f"{speed:,.0f}", *sizes, price, cost.why])
    what = f"{len(rows)} of {len(costs)} layouts fit {batch} x {context} tokens"
    print(f"{name} on {count} x {found.title}: {what}")
    heads = ["layout", "s", "tokens/s", "GB", "GB sent", "USD per 1e9 tokens", "time"]
    print_table(heads, rows, left=("time",))
    refused = [one for one in costs if one.refused]  # by memory
    reasons = Counter("too little memory" if one.memory_bytes else one.refused for one in refused)
    nearest = next((f"; nearest: {one.name} {one.refused}" for one in refused if one.memory_bytes), "")
    for reason, n in reasons.most_common(SHOWN):
        print(f"refused, {n}: {reason}{nearest if reason == 'too little memory' else ''}")
    if len(reasons) > SHOWN:
        print(f"and {len(reasons) - SHOWN:,} further reasons (--json)")
