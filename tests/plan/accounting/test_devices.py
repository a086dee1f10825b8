"""The table of devices and the errors of what it lacks."""

import re

import pytest
from tests.plan.test_plan import MACHINE

from whorl.errors import ConfigError
from whorl.plan.accounting.devices import devices, parse_devices, this_machine
from whorl.plan.accounting.number_formats import FORMATS


def test_every_device_has_sources_and_known_formats() -> None:
    columns = {name.partition("_")[0] for name in FORMATS}
    for device in devices().values():
        assert set(device.peaks) <= columns and device.watts
        for source in (device.source, *(device.price or ())[1:]):
            assert re.search(r", 20\d\d-\d\d$", source)  # with its date


def test_text_gives_device_and_count() -> None:
    device, count = parse_devices("h100x8")
    assert (device.name, count, device.peak("bf16"), device.peak("fp8_e4m3")) == (
        "h100",
        8,
        989.4e12,
        1978.9e12,
    )
    assert [parse_devices(text)[1] for text in ("h100", "mi300x", "mi300xx4")] == [1, 1, 4]


def test_missing_peak_price_and_device_are_named() -> None:
    mi300x, a100 = devices()["mi300x"], devices()["a100"]
    with pytest.raises(ConfigError, match="a100 has no peak for fp8_e4m3"):
        a100.peak("fp8_e4m3")
    with pytest.raises(ConfigError, match="mi300x has no price") as error:
        _ = mi300x.price_per_hour
    assert "h100" in str(error.value) and a100.price_per_hour > 0
    with pytest.raises(ConfigError, match="'h101' is unknown") as error:
        parse_devices("h101x2")
    assert "did you mean 'h100'" in str(error.value)
    with pytest.raises(ConfigError, match="h100x0"):
        parse_devices("h100x0")


def test_this_machine_has_measured_peaks_and_no_price() -> None:
    here = this_machine(MACHINE)
    assert here.peak("fp32") == MACHINE.flops["float32"] and here.bandwidth == MACHINE.memory_bandwidth
    with pytest.raises(ConfigError, match="here has no price"):
        _ = here.price_per_hour
