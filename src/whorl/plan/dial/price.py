"""A budget in dollars as seconds or FLOPs (`3usd@h100`)."""

from __future__ import annotations

from whorl.machine.budget import Budget
from whorl.machine.device_probe import Machine
from whorl.plan.accounting.devices import MFU, parse_devices


def in_compute(text: str, machine: Machine, deterministic: bool = False) -> tuple[Budget, list[str]]:
    """Return a budget without dollars, and a line that explains what they buy.

    They buy seconds if this machine is the device. Elsewhere, and if deterministic, they buy the FLOPs of these seconds at
    MFU of its peak.

    Raises:
        ConfigError: the device is unknown, or has no price.
    """
    budget = Budget.parse(text)
    if budget.usd is None:
        return budget, []
    device, count = parse_devices(budget.device)
    hours = budget.usd / (count * device.price_per_hour)
    name = next(name for name in ("bf16", "fp16", "fp32") if name in device.peaks)
    flops = hours * 3600 * count * device.peak(name) * MFU
    bought = f"budget: {text} = {hours:.3g} h of {count} x {device.title} at {device.price_per_hour:g} USD an hour each"
    if count == 1 and device.name in machine.gpu.lower() and not deterministic:
        return Budget(seconds=hours * 3600), [f"{bought}, which this machine is"]
    return Budget(flops=flops), [f"{bought} = {flops:.2g} FLOPs at {MFU:.0%} of its peak in {name}"]
