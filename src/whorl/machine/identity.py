"""Names a machine by what decides its speed: the CPU's family, model, stepping and flags, usable cores, GPU, torch.

Hypervisors give different CPUs one model name ("AMD EPYC" is at least Zen 4 and Zen 5), so a name alone identifies nothing.
The names here are used by the cache of measurements (`device_probe.py`), by choices of kernels (`kernel_choice.py`), by the
environment of a run, and by the benches. No import of torch.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
VENDORS = {"GenuineIntel": "intel", "AuthenticAMD": "amd", "HygonGenuine": "hygon", "0x41": "arm"}
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class CpuIdentity:
    """The first core in /proc/cpuinfo. Values are "" where the platform shows none."""

    name: str
    vendor: str = ""
    family: str = ""
    model: str = ""
    stepping: str = ""
    flags: tuple[str, ...] = ()  # sorted

    @property
    def full_name(self) -> str:
        """The model name with the numbers of family and model, for people."""
        return f"{self.name} family {self.family} model {self.model or '?'}" if self.family else self.name

    @property
    def amx(self) -> bool:
        """Whether the flags include bf16 tiles."""
        return "amx_bf16" in self.flags

    @property
    def kind(self) -> str:
        """A name for files, such as `intel-6-143-amx` or `amd-26-2`: equal for machines that differ in cores only."""
        parts = [VENDORS.get(self.vendor, self.vendor) or self.name, self.family, self.model]
        return slug(" ".join([*parts, "amx" if self.amx else ""]))


def slug(text: str) -> str:
    """Return lower-case words joined by hyphens."""
    return "-".join(re.findall(r"[a-z0-9]+", text.lower()))


def cpu_identity() -> CpuIdentity:
    """Read the identity of this machine's CPU."""
    found: dict[str, str] = {}
    if CPUINFO.exists():
        for line in CPUINFO.read_text(errors="replace").split("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            found[key.strip().lower()] = value.strip()
    return CpuIdentity(
        found.get("model name") or platform.processor() or platform.machine() or "unknown CPU",
        found.get("vendor_id", found.get("cpu implementer", "")),
        found.get("cpu family", found.get("cpu architecture", "")),
        found.get("model", found.get("cpu part", "")),
        found.get("stepping", found.get("cpu revision", "")),
        tuple(sorted(found.get("flags", found.get("features", "")).split())),
    )


def cpu_name() -> str:
    """The CPU's name with family and model, which reports and benches show."""
    return cpu_identity().full_name


def machine_kind(gpu: str = "") -> str:
    """Return the kind of this machine: the GPU's name if there is one, else that of the CPU."""
    return slug(gpu) or cpu_identity().kind


def request_amx() -> str:
    """Request from the kernel permission for this process to use tiles; return "" if granted, else the reason.

    Threads that start later inherit the permission. Flags do not show a kernel or a sandbox that refuses it.
    """
    cpu = cpu_identity()
    if not cpu.amx:
        return "the CPU has no AMX"
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return "permission for AMX is known for Linux on x86-64 only"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA):
        return f"the kernel refuses AMX (errno {ctypes.get_errno()})"
    return ""


@functools.cache
def warn_of_unused_amx() -> None:
    """Warn once that the CPU lists AMX, but native code does not use it, with the reason."""
    if cpu_identity().amx:
        reason = request_amx() or "the C++ compiler has no support for it"
        warnings.warn(f"AMX is not used: {reason}", RuntimeWarning, stacklevel=2)
