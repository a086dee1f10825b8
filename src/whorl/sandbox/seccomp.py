"""Allowed system calls, as a hand-built kernel filter.

seccomp(2) runs a classic BPF program before every system call. It reads the call's number and its six arguments as
numbers, not the memory they point to. This filter is a list of *allowed* calls: those with which CPython computes,
reads and writes permitted files, and reads the clock. Every other call returns EPERM (PermissionError in the program),
also a future one. Not
in the list: sockets, exec, fork, ptrace, other processes' memory, mounts, namespaces, chmod and chown (Landlock does
not restrict them), links, io_uring, bpf, keys, shared memory, priorities.

Some calls are allowed with certain arguments only:

    kill, tgkill         its own process
    prlimit64            its own process (a hard limit can only be lowered)
    clone                a thread, with exactly the C library's flags, if threads are allowed
    mmap, mprotect       never executable: no library or machine code can be loaded
    open, openat         not O_TRUNC with O_RDONLY, which empties a read-only file (Landlock before version 3)
    fcntl                duplicates and flags, but not F_SETOWN, which sends signals to others
    ioctl                queries of terminals and pipes

clone3 returns ENOSYS, so that the C library falls back to clone, whose flags are visible. A call in another convention
(32 bits, x32) kills the process. Call numbers are those of the kernel's tables, which never change.
"""

from __future__ import annotations

import errno
import struct

X86_64, AARCH64 = 0xC000003E, 0xC00000B7  # AUDIT_ARCH_*
ARCHITECTURES = {"x86_64": X86_64, "aarch64": AARCH64}

# name: (x86-64, aarch64); None if the call does not exist
ALLOWED_SYSCALLS: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "lseek": (8, 62),
    "munmap": (11, 215), "brk": (12, 214), "mremap": (25, 216), "madvise": (28, 233), "futex": (202, 98),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "sigaltstack": (131, 132),
    "exit": (60, 93), "exit_group": (231, 94), "getrandom": (318, 278), "getdents64": (217, 61),
    "stat": (4, None), "lstat": (6, None), "access": (21, None), "faccessat": (269, 48), "faccessat2": (439, 439),
    "statx": (332, 291), "statfs": (137, 43), "fstatfs": (138, 44), "readlink": (89, None), "readlinkat": (267, 78),
    "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "fsync": (74, 82), "fdatasync": (75, 83), "ftruncate": (77, 46), "copy_file_range": (326, 285), "sendfile": (40, 71),
    "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50), "umask": (95, 166),
    "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "unlink": (87, None), "unlinkat": (263, 35),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "pipe": (22, None), "pipe2": (293, 59), "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24),
    "poll": (7, None), "ppoll": (271, 73), "select": (23, None), "pselect6": (270, 72), "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21), "epoll_wait": (232, None), "epoll_pwait": (281, 22), "eventfd2": (290, 19),
    "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "nanosleep": (35, 101), "clock_nanosleep": (230, 115),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "gettimeofday": (96, 169), "time": (201, None),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None), "pause": (34, None), "times": (100, 153),
    "getrusage": (98, 165), "getrlimit": (97, 163), "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168),
    "getpid": (39, 172), "gettid": (186, 178), "getppid": (110, 173), "getpgrp": (111, None), "getpgid": (121, 155),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getsid": (124, 156),
    "set_robust_list": (273, 99), "rseq": (334, 293), "membarrier": (324, 283), "restart_syscall": (219, 128),
}  # fmt: skip
KILL, TGKILL, PRLIMIT, CLONE, CLONE3 = (62, 129), (234, 131), (302, 261), (56, 220), (435, 435)
MMAP, MPROTECT, OPEN, OPENAT, FCNTL, IOCTL = (9, 222), (10, 226), (2, None), (257, 56), (72, 25), (16, 29)

# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC; F_SETFL is allowed without O_ASYNC
FCNTL_COMMANDS = (0, 1, 2, 3, 1030)
# TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
IOCTL_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
THREAD_FLAGS = 0x3D0F00  # VM FS FILES SIGHAND THREAD SYSVSEM SETTLS PARENT_SETTID CHILD_CLEARTID
PROT_EXEC, O_ACCMODE, O_TRUNC, O_ASYNC, F_SETFL = 4, 3, 0o1000, 0o20000, 4

# BPF: LD|W|ABS, JMP|JA, JEQ|K, JGE|K, JSET|K, ALU|AND|K, RET|K
BPF_LOAD, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JSET = 0x20, 0x05, 0x15, 0x35, 0x45
BPF_AND, BPF_RET = 0x54, 0x06
RET_ALLOW, RET_KILL_PROCESS, RET_ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCHITECTURE, X32 = 0, 4, 0x40000000  # offsets in struct seccomp_data; the bit that marks an x32 call
BPFInstruction = tuple[int, int, int, int]  # code, jump if true, jump if false, k


def _argument(i: int) -> int:
    return 16 + 8 * i  # its low 32 bits: both architectures are little-endian


def _return_errno(number: int = errno.EPERM) -> BPFInstruction:
    return (BPF_RET, 0, 0, RET_ERRNO | number)


def _search(ranges: list[tuple[int, list[BPFInstruction]]]) -> list[BPFInstruction]:
    """Return a binary search of the call's number, in the accumulator, among sorted (first number, body).

    Each body must always return. The kernel runs a new filter once for every number, to find those that it always
    allows; so a list of comparisons took longer than all that a program calls.
    """
    if len(ranges) == 1:
        return ranges[0][1]
    half = len(ranges) // 2
    low, high = _search(ranges[:half]), _search(ranges[half:])
    return [(BPF_JGE, 0, 1, ranges[half][0]), (BPF_JA, 0, 0, len(low)), *low, *high]


def _allow_values(argument: int, values: tuple[int, ...]) -> list[BPFInstruction]:
    """Allow these values of an argument."""
    body: list[BPFInstruction] = [(BPF_LOAD, 0, 0, _argument(argument))]
    for value in values:
        body += [(BPF_JEQ, 0, 1, value), (BPF_RET, 0, 0, RET_ALLOW)]
    return [*body, _return_errno()]


def _allow_without_bits(argument: int, bits: int) -> list[BPFInstruction]:
    """Allow an argument without these bits."""
    return [
        (BPF_LOAD, 0, 0, _argument(argument)),
        (BPF_JSET, 0, 1, bits),
        _return_errno(),
        (BPF_RET, 0, 0, RET_ALLOW),
    ]


def _check_open_flags(flags: int) -> list[BPFInstruction]:
    return [
        (BPF_LOAD, 0, 0, _argument(flags)),
        (BPF_AND, 0, 0, O_ACCMODE | O_TRUNC),
        (BPF_JEQ, 0, 1, O_TRUNC),  # O_RDONLY is 0
        _return_errno(),
        (BPF_RET, 0, 0, RET_ALLOW),
    ]


def seccomp_filter(machine: str, pid: int, threads: bool) -> bytes:
    """Return the filter as an array of struct sock_filter.

    Args:
        machine: "x86_64" or "aarch64".
        pid: pid of the process that applies it.
        threads: whether the process may start threads.

    Raises:
        KeyError: another machine.
    """
    column = list(ARCHITECTURES).index(machine)
    code: list[BPFInstruction] = [
        (BPF_LOAD, 0, 0, ARCHITECTURE),
        (BPF_JEQ, 1, 0, ARCHITECTURES[machine]),
        (BPF_RET, 0, 0, RET_KILL_PROCESS),
        (BPF_LOAD, 0, 0, NUMBER),
        (BPF_JSET, 0, 1, X32),
        (BPF_RET, 0, 0, RET_KILL_PROCESS),
    ]
    allow, deny = [(BPF_RET, 0, 0, RET_ALLOW)], [_return_errno()]
    flags = [(BPF_LOAD, 0, 0, _argument(1)), (BPF_JEQ, 0, 4, F_SETFL), *_allow_without_bits(2, O_ASYNC)]
    special: list[tuple[tuple[int, int | None], list[BPFInstruction]]] = [
        (MMAP, _allow_without_bits(2, PROT_EXEC)),
        (MPROTECT, _allow_without_bits(2, PROT_EXEC)),
        (OPEN, _check_open_flags(1)),
        (OPENAT, _check_open_flags(2)),
        (FCNTL, [*flags, *_allow_values(1, FCNTL_COMMANDS)]),
        (IOCTL, _allow_values(1, IOCTL_COMMANDS)),
        (KILL, _allow_values(0, (pid,))),
        (TGKILL, _allow_values(0, (pid,))),
        (PRLIMIT, _allow_values(0, (0, pid))),
        (CLONE, _allow_values(0, (THREAD_FLAGS,)) if threads else [_return_errno()]),
        (CLONE3, [_return_errno(errno.ENOSYS)]),
    ]
    bodies = {numbers[column]: body for numbers, body in special}
    bodies |= {numbers[column]: allow for numbers in ALLOWED_SYSCALLS.values()}
    ranges: list[tuple[int, list[BPFInstruction]]] = [(0, bodies.get(0, deny))]
    for number in range(1, max(n for n in bodies if n is not None) + 2):  # the last range is denied
        body = bodies.get(number, deny)
        if body is not ranges[-1][1]:
            ranges.append((number, body))
    code += _search(ranges)
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in code)
