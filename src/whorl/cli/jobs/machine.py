"""`whorl machine`: the machine as measured, and how fast it computes the products of a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from whorl.cli.options import StoreOption
from whorl.cli.plan.model_argument import find_model

if TYPE_CHECKING:
    from whorl.machine.device_probe import Machine
    from whorl.train.profiling.product_table import TimedProduct

DEFAULT_SHAPE = "3x192/1024/8x256"  # of the quickstart, where no plan is in the store
PLAN = "quickstart/plan"


def machine(
    shape: Annotated[
        str | None,
        typer.Argument(
            metavar="[SHAPE]",
            help="layers x width / vocabulary / rows x tokens, as 6x384/8192/16x256; or a MODEL of `whorl plan`. "
            "Default: the plan of the quickstart.",
        ),
    ] = None,
    step: Annotated[
        str, typer.Option(metavar="training|decoding|both", help="Steps whose products are listed.")
    ] = "both",
    batch: Annotated[
        str | None, typer.Option(metavar="8x256", help="Rows x tokens of a training step, over all replicas.")
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(min=1, help="Replicas that share the rows and threads; default: one for each thread."),
    ] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Time again what was timed on this machine before.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    store: StoreOption = None,
) -> None:
    """Measure this machine, and time every matrix product of a model in each way to compute it.

    The first lines are the choices that training and the engine make by timing when they begin: attention, mlp, head,
    orthogonalize and others, and engine_step. They are kept for this machine. The other lines are the linear layers of a
    step. In training they run in the first way; the other ways show what a choice could gain. A line without calls is a
    part of another one, or no matrix product.

    The bound is the best measured GEMM rate of the type, or the memory bandwidth. Low shares in lines with many calls show
    what limits a step. `whorl profile` traces a whole training step.

    WHORL_CHOOSE=attention=blocked,head=512 forces choices of training and engine, by the first word of their lines, as
    `--set kernels.attention=blocked` does in `whorl run`.

    Examples:

        whorl machine

        whorl machine 6x384/8192/16x256 --step training

        whorl machine quickstart/pretrain --step decoding --json
    """
    import json

    from whorl.errors import ConfigError, one_of
    from whorl.machine.device_probe import CPU_DTYPES, probe
    from whorl.models.transformer_cost import unlisted_parts
    from whorl.store import Store
    from whorl.train.profiling.product_table import ProductTimes

    if step not in ("training", "decoding", "both"):
        raise ConfigError(f"--step {step}", expected=one_of(step, ("training", "decoding", "both")))
    found = probe(device="cpu")
    if found.dtype not in CPU_DTYPES:
        raise ConfigError(
            f"WHORL_DTYPE={found.dtype}: no rate of a CPU to compare with",
            expected=one_of(found.dtype, CPU_DTYPES),
            do="unset it, or give one of these",
        )
    try:
        model, source, sizes = find_model(shape or PLAN, Store(store))
    except ConfigError:
        if shape is not None:
            raise
        model, source, sizes = find_model(DEFAULT_SHAPE, Store(store))
    rows, length = sizes if batch is None else _parse_batch(batch)
    replicas = replicas or max(n for n in range(1, found.threads + 1) if rows % n == 0)
    if rows % replicas:
        raise ConfigError(f"--replicas {replicas}", expected=f"a divisor of the {rows} rows")
    timed = ProductTimes(
        model, rows // replicas, length, found.dtype, max(1, found.threads // replicas), found.cores
    )
    lines = {
        "training": timed.training(refresh) if step != "decoding" else [],
        "decoding": timed.decoding(refresh) if step != "training" else [],
    }
    sizes_of_step = {"shape": source, "rows": rows, "length": length, "replicas": replicas}
    about = {**describe_machine(found), **sizes_of_step}
    if as_json:
        made = {name: [line.to_json() for line in of_step] for name, of_step in lines.items()}
        print(json.dumps({**about, "left_out": unlisted_parts(model), **made}, indent=1))
    else:
        print(format_table(about, lines, unlisted_parts(model)))


def _parse_batch(text: str) -> tuple[int, int]:
    from whorl.errors import ConfigError

    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise ConfigError(f"--batch {text}", expected="rows x tokens, such as 8x256")
    return int(match[1]), int(match[2])


def describe_machine(found: Machine) -> dict[str, Any]:
    """Return the machine's identity, measured rates, and forced choices."""
    from whorl.engine.cpu import build
    from whorl.machine.identity import cpu_identity, machine_kind, request_amx
    from whorl.machine.kernel_choice import choices_file, forced_choices

    identity = cpu_identity()
    return {
        "machine": identity.full_name,
        "kind": machine_kind(),
        "cores": found.cores,
        "threads": found.threads,
        "dtype": found.dtype,
        "flops": found.flops,
        "memory_bandwidth": found.memory_bandwidth,
        "gpu": describe_gpu(),
        "amx": request_amx() or "available",
        "native_library": build.library() is not None,
        "choices": str(choices_file()),
        "forced": forced_choices(),
    }


def describe_gpu() -> dict[str, Any] | None:
    """Return name and measured rates of the GPU; None if torch finds none."""
    import torch

    from whorl.machine.device_probe import probe

    if not torch.cuda.is_available():
        return None
    found = probe(device="cuda")
    return {"name": found.gpu, "flops": found.flops, "memory_bandwidth": found.memory_bandwidth}


def format_table(about: dict[str, Any], lines: dict[str, list[TimedProduct]], missing: list[str]) -> str:
    """Return the tables as text."""
    from whorl.train.profiling.product_table import format_products, total

    def rates(flops: dict[str, float], unit: float) -> str:
        return ", ".join(f"{kind} {rate / unit:,.0f}" for kind, rate in flops.items())

    found = [
        f"{about['machine']} ({about['kind']}): usable cores {about['cores']}, threads {about['threads']}.",
        f"GEMM in GFLOP/s: {rates(about['flops'], 1e9)}. Copy: {about['memory_bandwidth'] / 1e9:,.1f} GB/s. "
        f"AMX: {about['amx']}. Native library: {'available' if about['native_library'] else 'none'}.",
        *(
            f"GPU {gpu['name']}, which the lines below leave out: GEMM in TFLOP/s: {rates(gpu['flops'], 1e12)}. "
            f"Copy: {gpu['memory_bandwidth'] / 1e9:,.0f} GB/s."
            for gpu in [about["gpu"]]
            if gpu
        ),
        f"Times of this machine: {about['choices']}",
        *(f"forced: {name} = {way}" for name, way in about["forced"].items()),
        f"Shape {about['shape']}; batch {about['rows']} x {about['length']} tokens; replicas {about['replicas']}.",
        *(f"Not listed: {part}." for part in missing),
    ]
    for step, of_step in lines.items():
        if of_step:
            found += ["", f"{step}:", format_products(of_step)]
    if lines["training"]:
        seconds, bound = total(lines["training"])
        found += [
            "",
            f"Products of a training step of one replica: {1e3 * seconds:,.1f} ms, {bound / seconds:.0%} of the bound "
            f"({1e3 * bound:,.1f} ms).",
        ]
    return "\n".join(found)
