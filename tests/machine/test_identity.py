"""The identity of a machine, and measurements that are reused on the same machine only."""

from __future__ import annotations

import ctypes
import json
import re
import warnings
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.machine.test_machine import measurement

from whorl.machine import device_probe, identity

INTEL = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Processor
stepping\t: 8
flags\t\t: fpu avx512_bf16 amx_tile amx_bf16
"""
AMD = (
    "vendor_id : AuthenticAMD\ncpu family : {}\nmodel : {}\nmodel name : AMD EPYC\nflags : fpu avx512_bf16\n"
)
ARM = "BogoMIPS : 50\nFeatures : fp asimd\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : 0xd40\n"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        (INTEL, "intel-6-143-amx", "Intel(R) Xeon(R) Processor family 6 model 143"),
        (
            INTEL.replace(" amx_tile amx_bf16", ""),
            "intel-6-143",
            "Intel(R) Xeon(R) Processor family 6 model 143",
        ),
        (AMD.format(25, 17), "amd-25-17", "AMD EPYC family 25 model 17"),
        (AMD.format(26, 2), "amd-26-2", "AMD EPYC family 26 model 2"),
        (ARM, "arm-8-0xd40", None),
    ],
)
def test_kind_and_name(
    text: str, kind: str, name: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(text + "\n" + text.replace("model", "another model"))
    monkeypatch.setattr(identity, "CPUINFO", tmp_path / "cpuinfo")
    assert identity.machine_kind() == kind and identity.machine_kind("NVIDIA H100 80GB") == "nvidia-h100-80gb"
    assert name is None or identity.cpu_name() == name
    assert identity.cpu_identity().amx == ("amx" in kind)


@pytest.mark.parametrize(
    ("flags", "answer", "reason"),
    [("amx_bf16", 0, ""), ("amx_bf16", -1, "the kernel refuses AMX"), ("avx2", 0, "the CPU has no AMX")],
)
def test_request_amx_reports_a_refusal(
    flags: str, answer: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "cpu_identity", lambda: identity.CpuIdentity("X", flags=(flags,)))
    monkeypatch.setattr(identity.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(identity.sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: Mock(syscall=Mock(return_value=answer)))
    assert identity.request_amx().startswith(reason) and bool(identity.request_amx()) == bool(reason)
    identity.warn_of_unused_amx.cache_clear()
    with warnings.catch_warnings(record=True) as found:
        for _ in range(2):
            identity.warn_of_unused_amx()
    identity.warn_of_unused_amx.cache_clear()
    expected = (
        [] if flags == "avx2" else [f"AMX is not used: {reason or 'the C++ compiler has no support for it'}"]
    )
    assert [str(one.message).partition(" (")[0] for one in found] == expected


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Mock:
    """A measurement by each call of `measure`, with the rate `rates.bf16`; `rates.fraction` of a core is free."""
    control = Mock(bf16=8e11, fraction=1.0)
    monkeypatch.setattr(
        device_probe,
        "current_rates",
        lambda: ({"float32": 1e11, "bfloat16": control.bf16}, control.fraction),
    )
    control.measure = Mock(side_effect=lambda *_, **__: measurement(bf16=control.bf16))
    monkeypatch.setattr(device_probe, "measure", control.measure)
    monkeypatch.setattr(device_probe, "cache_folder", lambda: tmp_path)
    return control


def measured_by_new_process(monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the place of the measurement of this machine."""
    monkeypatch.setattr(device_probe, "_found", {})
    return device_probe.measured_machine()[1].rpartition("-")[2]


def test_measurement_of_another_machine_is_not_reused(
    rates: Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured_by_new_process(monkeypatch) == "0"
    rates.bf16 = 8e11 / 2  # neighbors on the host
    assert measured_by_new_process(monkeypatch) == "0" and rates.measure.call_count == 1
    rates.bf16 = 2e11  # throttled, or another CPU of this name
    assert measured_by_new_process(monkeypatch) == "1" and rates.measure.call_count == 2
    rates.bf16 = 8e11  # both are kept
    assert measured_by_new_process(monkeypatch) == "0" and rates.measure.call_count == 2
    for slower in (10, 100, 1000, 10000):
        rates.bf16 = 8e11 / slower
        measured_by_new_process(monkeypatch)
    (path,) = tmp_path.glob("machine-*.json")
    assert len(json.loads(path.read_text())) == device_probe.MAX_MEASUREMENTS


def test_measurement_is_kept_under_contention(rates: Mock, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_by_new_process(monkeypatch)
    rates.bf16, rates.fraction = 1e11, 0.5  # other processes use half of the core
    assert measured_by_new_process(monkeypatch) == "0" and rates.measure.call_count == 1
    rates.bf16 = 8e12  # which other processes cannot cause
    assert measured_by_new_process(monkeypatch) == "1" and rates.measure.call_count == 2


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        (("max 100000",), 8),
        (("150000 100000",), 2),
        (("-1", "100000"), 8),
        (("50000", "100000"), 1),
        (("garbage",), 8),
    ],
)
def test_usable_cores_obey_the_quota(
    files: tuple[str, ...], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = tuple(tmp_path / str(number) for number in range(len(files)))
    for path, text in zip(paths, files, strict=True):
        path.write_text(text + "\n")
    monkeypatch.setattr(device_probe, "QUOTAS", ((tmp_path / "absent",), paths))
    monkeypatch.setattr(device_probe.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert device_probe.usable_cores() == cores


def test_only_usable_cores_counts_cores() -> None:
    package = Path(device_probe.__file__).parents[1]
    counted = re.compile(r"cpu_count\(|len\(os\.sched_getaffinity")
    found = {path.name for path in package.rglob("*.py") if counted.search(path.read_text())}
    assert found == {"device_probe.py"}
