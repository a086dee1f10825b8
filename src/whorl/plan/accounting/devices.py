"""Devices: peaks by number format, memory, links, power and price, from `devices.toml`; `here` is measured.

device, count = parse_devices("h100x8")
device.peak("bf16")       # FLOP/s
device.price_per_hour     # US dollars
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from whorl.errors import ConfigError, one_of
from whorl.machine.device_probe import DTYPE_ABBREVIATIONS, Machine, probe
from whorl.plan.accounting.number_formats import number_format
from whorl.plan.cluster import ClusterSpec, Link

HERE = "here"
MFU = 0.4  # of a peak, that a training step is assumed to reach


class Device(NamedTuple):
    """One accelerator, or this machine, with the fields that `devices.toml` explains."""

    name: str
    title: str
    peaks: dict[str, float]
    memory_bytes: float
    bandwidth: float
    node: float
    network: float
    source: str
    watts: float | None = None
    price: tuple[float, str] | None = None

    def peak(self, name: str) -> float:
        """Return the operations/s in a number format. Raises ConfigError: it is unknown, or the device has no peak."""
        column = name.partition("_")[0]
        if number_format(name) and column not in self.peaks:
            expected, do = f"one of: {', '.join(self.peaks)}", "give --dtype one of these, or another device"
            raise ConfigError(f"device {self.name} has no peak for {name}", expected=expected, do=do)
        return self.peaks[column]

    @property
    def price_per_hour(self) -> float:
        """US dollars of an hour. Raises ConfigError: the device has no price."""
        if self.price is None:
            expected = f"one of: {', '.join(name for name, device in devices().items() if device.price)}"
            do = "give the budget in seconds or FLOPs, or another device"
            raise ConfigError(f"device {self.name} has no price", expected=expected, do=do)
        return self.price[0]

    def cluster(self, dtype: str) -> ClusterSpec:
        """Return nodes of 8 such devices for `plan/layout_cost.py`, at MFU of the peak. Raises ConfigError as `peak`."""
        node, network = (
            Link(latency=t, bandwidth=b) for t, b in ((5e-6, self.node), (1e-5, self.network))
        )  # assumed
        flops, memory = MFU * self.peak(dtype), self.memory_bytes
        return ClusterSpec(devices_per_node=8, flops=flops, memory_bytes=memory, node=node, network=network)


@cache
def devices() -> dict[str, Device]:
    """Return the devices of the table, by name."""
    tables = tomllib.loads(files(__package__).joinpath("devices.toml").read_text("utf-8"))
    return {name: Device(name=name, **fields.pop("limits"), **fields) for name, fields in tables.items()}


def this_machine(machine: Machine | None = None) -> Device:
    """Return this machine: measured rates of matrix products and of a copy. It has no price."""
    m = machine or probe()
    peaks, link = (
        {DTYPE_ABBREVIATIONS[kind]: speed for kind, speed in m.flops.items()},
        m.memory_bandwidth / 8,
    )
    source = "measured now, as by `whorl machine`"
    return Device(HERE, m.gpu or m.cpu, peaks, m.ram_bytes, m.memory_bandwidth, link, link, source)


def parse_devices(text: str) -> tuple[Device, int]:
    """Return the device and the count of `h100x8` or `here`. Raises ConfigError: unknown, or a count of 0."""
    given = text.strip().lower()
    match = re.fullmatch(r"(.+?)x(\d+)", given)
    name, count = (match[1], int(match[2])) if match and given not in devices() else (given, 1)
    if name != HERE and name not in devices():
        raise ConfigError(f"device {name!r} is unknown", expected=one_of(name, [HERE, *devices()]))
    if count < 1:
        raise ConfigError(f"devices {text!r}", expected="a count of at least 1, such as h100x8")
    return (this_machine() if name == HERE else devices()[name]), count
