"""The page of a roofline: what bounds each operator of a model's steps on a device, and measured products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log10
from typing import TYPE_CHECKING, Any

from whorl.report.blocks import Block, Column, Curve, Line, LineStyle, Table

if TYPE_CHECKING:
    from whorl.machine.device_probe import Machine
    from whorl.plan.accounting.devices import Device
    from whorl.plan.ladder import Shape

STYLES: tuple[LineStyle, ...] = ("main", "second", "third", "fourth", "fifth")
NOTE = (
    "Logarithms of base 10 of FLOP/s against FLOPs per byte. The slope is the bandwidth of the memory, the flat part the "
    "peak. Operators lie on the roof, which no program exceeds. Measured products lie below it by what they lose."
)


def study_roofline(shape: Shape, vocab_size: int, machine: Machine) -> list[Block]:
    """Return the roofline of a shape of the planner on this machine, in its type."""
    from whorl.machine.device_probe import DTYPE_ABBREVIATIONS
    from whorl.plan.accounting.devices import this_machine
    from whorl.plan.accounting.model_cost import ModelCost, decoder_config
    from whorl.plan.accounting.roofline import STEPS, operators
    from whorl.plan.config import PlanConfig

    dtype = DTYPE_ABBREVIATIONS[str(machine.torch_dtype).removeprefix("torch.")]
    device = this_machine(machine)
    data, cost = PlanConfig().data, ModelCost(decoder_config(*shape, vocab_size), dtype)
    found = {step: operators(cost, step, data.batch_size, data.seq_len) for step in STEPS}
    steps = {step: [one.on(device, dtype) for one in each] for step, each in found.items()}
    return roofline_blocks(device, dtype, steps, section="Roofline")


def roofline_blocks(
    device: Device, dtype: str, steps: Mapping[str, Sequence[Mapping[str, Any]]],
    measured: Sequence[tuple[float, float]] = (), section: str = "",
) -> list[Block]:  # fmt: skip
    """Return the picture and a table of each step.

    Args:
        steps: of `Operator.on`, by step.
        measured: (FLOPs per byte, FLOP/s) of products on the device.
    """
    peak, ridge = device.peak(dtype), device.peak(dtype) / device.bandwidth
    found = {step: [one["intensity"] for one in each if one["flops"]] for step, each in steps.items()}
    ends = [ridge, *(x for each in found.values() for x in each), *(x for x, _ in measured)]
    found = {"roof": [min(ends) / 2, ridge, 2 * max(ends)], **found}
    points = {n: [(x, min(peak, x * device.bandwidth)) for x in sorted(each)] for n, each in found.items()}
    lines = []
    for (name, pairs), style in zip({**points, "measured": measured}.items(), STYLES, strict=True):
        if pairs:
            x, y = ([log10(value) for value in axis] for axis in zip(*pairs, strict=True))
            lines.append(Line(name=name, x=x, y=y, style=style, dots=name != "roof", joined=name == "roof"))
    about = f"{device.title}, {dtype}"
    blocks: list[Block] = [
        Curve(section=section, title=about, lines=lines, x_label="log10 FLOPs per byte", note=NOTE)
    ]
    for step, each in steps.items():
        columns = [Column(name=name, number=name not in ("name", "part", "bound")) for name in each[0]]
        rows: list[Any] = [[v if isinstance(v, str) else f"{v:.3g}" for v in one.values()] for one in each]
        blocks.append(Table(section=section, title=step, columns=columns, rows=rows))
    return blocks
