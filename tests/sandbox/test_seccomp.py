"""Checks that run on any platform: the seccomp filter, in a BPF interpreter in Python, and rejected arguments."""

from __future__ import annotations

import errno
import struct
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.sandbox import ResourceLimits, Sandbox, seccomp

PID = 4242
DENIED = seccomp.RET_ERRNO | errno.EPERM


def run_filter(machine: str, number: int, *arguments: int, threads: bool = False, arch: int = 0) -> int:
    """Return the filter's result: an interpreter for the classic BPF instructions that it uses."""
    arch = arch or seccomp.ARCHITECTURES[machine]
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *[a & (2**64 - 1) for a in padded])
    code = list(struct.iter_unpack("<HBBI", seccomp.seccomp_filter(machine, PID, threads)))
    pc, accumulator = 0, 0
    while True:
        operation, if_true, if_false, k = code[pc]
        pc += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= k
        elif operation == 0x05:  # BPF_JMP | BPF_JA
            pc += k
        elif operation == 0x35:  # BPF_JMP | BPF_JGE | BPF_K
            pc += if_true if accumulator >= k else if_false
        elif operation == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            pc += if_true if accumulator == k else if_false
        elif operation == 0x45:  # BPF_JMP | BPF_JSET | BPF_K
            pc += if_true if accumulator & k else if_false
        else:
            assert operation == 0x06  # BPF_RET | BPF_K
            return int(k)


MACHINES = pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])


@MACHINES
@given(number=st.integers(0, 600), arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_filter_denies_unlisted_calls(machine: str, column: int, number: int, arguments: list[int]) -> None:
    result = run_filter(machine, number, *arguments)
    special = (seccomp.KILL, seccomp.TGKILL, seccomp.PRLIMIT, seccomp.CLONE, seccomp.CLONE3, seccomp.MMAP, seccomp.MPROTECT,
               seccomp.OPEN, seccomp.OPENAT, seccomp.FCNTL, seccomp.IOCTL)  # fmt: skip
    if number in {pair[column] for pair in seccomp.ALLOWED_SYSCALLS.values()}:
        assert result == seccomp.RET_ALLOW
    elif number not in {pair[column] for pair in special}:
        assert result == DENIED


@MACHINES
def test_filter_denies_escape_calls(machine: str, column: int) -> None:
    # socket connect bind ptrace execve execveat mount unshare setns bpf process_vm_readv io_uring_setup prctl fork vfork
    # chmod chown link symlink truncate memfd_create pidfd_open pidfd_send_signal
    forbidden = (
        "41 42 49 101 59 322 165 272 308 321 310 425 157 57 58 90 92 86 88 76 319 434 424",
        "198 203 200 117 221 281 40 97 268 280 270 425 167 53 54 37 36 45 279 434 424",
    )
    for number in forbidden[column].split():
        assert run_filter(machine, int(number)) == DENIED, number


@MACHINES
def test_filter_checks_arguments(machine: str, column: int) -> None:
    def allowed(pair: tuple[int | None, int | None], *arguments: int, threads: bool = False) -> bool:
        number = pair[column]
        assert number is not None
        return run_filter(machine, number, *arguments, threads=threads) == seccomp.RET_ALLOW

    for kill in (seccomp.KILL, seccomp.TGKILL):
        assert allowed(kill, PID, 9) and not any(allowed(kill, p, 9) for p in (0, 1, -1, -PID, PID + 1))
    assert [allowed(seccomp.PRLIMIT, pid) for pid in (0, PID, 1)] == [True, True, False]
    assert [allowed(seccomp.MMAP, 0, 4096, protection) for protection in (3, 7)] == [True, False]
    assert not allowed(seccomp.MPROTECT, 0, 4096, 5)
    flags = {0: True, 0o1101: True, 0o1002: True, 0o1000: False, 0o2001000: False}  # O_TRUNC is 0o1000
    assert {flag: allowed(seccomp.OPENAT, 0, 0, flag) for flag in flags} == flags
    for arguments in ((3, 1), (3, 4, 0o4000), (3, 1030)):
        assert allowed(seccomp.FCNTL, *arguments)
    for arguments in ((3, 8, 1), (3, 10, 9), (3, 4, 0o20000)):  # F_SETOWN, F_SETSIG, O_ASYNC
        assert not allowed(seccomp.FCNTL, *arguments)
    assert allowed(seccomp.IOCTL, 1, 0x5401)
    assert not allowed(seccomp.IOCTL, 1, 0x5412)  # TIOCSTI writes into a terminal
    assert allowed(seccomp.CLONE, 0x3D0F00, threads=True) and not allowed(seccomp.CLONE, 0x3D0F00)
    assert not any(allowed(seccomp.CLONE, flags, threads=True) for flags in (17, 0x3D0F00 | 0x10000000))
    assert run_filter(machine, seccomp.CLONE3[column]) == seccomp.RET_ERRNO | errno.ENOSYS


@MACHINES
def test_filter_kills_on_other_calling_convention(machine: str, column: int) -> None:
    assert run_filter(machine, 0, arch=0x40000003) == seccomp.RET_KILL_PROCESS  # 32 bits
    assert run_filter(machine, 0x40000000 | 59) == seccomp.RET_KILL_PROCESS  # x32


def test_filter_rejects_unknown_machine() -> None:
    with pytest.raises((KeyError, ValueError)):
        seccomp.seccomp_filter("riscv64", PID, False)


WRONG_LIMITS = [(name, -1) for name in ("wall_seconds", "memory_bytes", "processes", "file_bytes")]


@pytest.mark.parametrize(("name", "value"), [*WRONG_LIMITS, ("wall_seconds", float("nan"))])
def test_limits_reject_invalid_values(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ResourceLimits(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"), [({"workers": 0}, "workers is 0"), ({"allow_missing": {"landlok"}}, "landlok")]
)
def test_sandbox_rejects_arguments(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sandbox(**options)


def test_sandbox_rejects_other_platforms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match="darwin"):
        Sandbox()
