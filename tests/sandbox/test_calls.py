"""The filter, run by a small interpreter of its own beside the kernel: what it allows, for both architectures."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from whorl.sandbox import seccomp as calls

PID = 4242
REFUSED = calls.RET_ERRNO | errno.EPERM


def answer(
    machine: str, number: int, *arguments: int, threads: bool = False, architecture: int | None = None
) -> int:
    """What the filter says: classic BPF, the few instructions that we use."""
    arch = calls.ARCHITECTURES[machine] if architecture is None else architecture
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number & 0xFFFFFFFF, arch, 0, *[a & (2**64 - 1) for a in padded])
    code = list(struct.iter_unpack("<HBBI", calls.seccomp_filter(machine, PID, threads)))
    at, accumulator = 0, 0
    while True:
        operation, if_true, if_false, k = code[at]
        at += 1
        if operation == 0x20:  # BPF_LD | BPF_W | BPF_ABS
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x54:  # BPF_ALU | BPF_AND | BPF_K
            accumulator &= k
        elif operation == 0x15:  # BPF_JMP | BPF_JEQ | BPF_K
            at += if_true if accumulator == k else if_false
        elif operation == 0x45:  # BPF_JMP | BPF_JSET | BPF_K
            at += if_true if accumulator & k else if_false
        else:
            assert operation == 0x06  # BPF_RET | BPF_K
            return int(k)


MACHINES = pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])


@MACHINES
@given(number=st.integers(0, 600), arguments=st.lists(st.integers(0, 2**64 - 1), max_size=6))
def test_what_is_not_in_the_list_is_refused(
    machine: str, column: int, number: int, arguments: list[int]
) -> None:
    said = answer(machine, number, *arguments)
    special = (calls.KILL, calls.TGKILL, calls.PRLIMIT, calls.CLONE, calls.CLONE3, calls.MMAP, calls.MPROTECT,
               calls.OPEN, calls.OPENAT, calls.FCNTL, calls.IOCTL)  # fmt: skip
    if number in {pair[column] for pair in calls.ALLOWED_SYSCALLS.values()}:
        assert said == calls.RET_ALLOW
    elif number not in {pair[column] for pair in special}:
        assert said == REFUSED


@MACHINES
def test_calls_that_lead_out_are_refused(machine: str, column: int) -> None:
    forbidden = {  # socket connect bind ptrace execve execveat mount unshare setns bpf process_vm_readv io_uring_setup prctl
        0: [
            41,
            42,
            49,
            101,
            59,
            322,
            165,
            272,
            308,
            321,
            310,
            425,
            157,
            57,
            58,
            90,
            92,
            86,
            88,
            76,
            319,
            434,
            424,
        ],
        1: [198, 203, 200, 117, 221, 281, 40, 97, 268, 280, 270, 425, 167, 53, 54, 37, 36, 45, 279, 434, 424],
    }  # .. fork vfork chmod chown link symlink truncate memfd_create pidfd_open pidfd_send_signal
    for number in forbidden[column]:
        assert answer(machine, number) == REFUSED, number


@MACHINES
def test_arguments_are_looked_at(machine: str, column: int) -> None:
    def said(pair: tuple[int | None, int | None], *arguments: int, threads: bool = False) -> bool:
        number = pair[column]
        assert number is not None
        return answer(machine, number, *arguments, threads=threads) == calls.RET_ALLOW

    for kill in (calls.KILL, calls.TGKILL):
        assert said(kill, PID, 9) and not any(said(kill, p, 9) for p in (0, 1, -1, -PID, PID + 1))
    assert said(calls.PRLIMIT, 0) and said(calls.PRLIMIT, PID) and not said(calls.PRLIMIT, 1)
    assert (
        said(calls.MMAP, 0, 4096, 3)
        and not said(calls.MMAP, 0, 4096, 7)
        and not said(calls.MPROTECT, 0, 4096, 5)
    )
    assert (
        said(calls.OPENAT, 0, 0, 0) and said(calls.OPENAT, 0, 0, 0o1101) and said(calls.OPENAT, 0, 0, 0o1002)
    )
    assert not said(calls.OPENAT, 0, 0, 0o1000) and not said(calls.OPENAT, 0, 0, 0o2001000)
    assert said(calls.FCNTL, 3, 1) and said(calls.FCNTL, 3, 4, 0o4000) and said(calls.FCNTL, 3, 1030)
    assert (
        not said(calls.FCNTL, 3, 8, 1)
        and not said(calls.FCNTL, 3, 10, 9)
        and not said(calls.FCNTL, 3, 4, 0o20000)
    )
    assert said(calls.IOCTL, 1, 0x5401) and not said(calls.IOCTL, 1, 0x5412)  # TIOCSTI writes into a terminal
    assert said(calls.CLONE, 0x3D0F00, threads=True) and not said(calls.CLONE, 0x3D0F00)
    assert not said(calls.CLONE, 17, threads=True) and not said(
        calls.CLONE, 0x3D0F00 | 0x10000000, threads=True
    )
    assert answer(machine, calls.CLONE3[column]) == calls.RET_ERRNO | errno.ENOSYS


@MACHINES
def test_another_convention_ends_the_process(machine: str, column: int) -> None:
    assert answer(machine, 0, architecture=0x40000003) == calls.RET_KILL_PROCESS  # 32 bits
    assert answer(machine, 0x40000000 | 59) == calls.RET_KILL_PROCESS  # x32


def test_another_machine_has_no_filter() -> None:
    with pytest.raises((KeyError, ValueError)):
        calls.seccomp_filter("riscv64", PID, False)
