"""Confine the calling process, permanently and before the first untrusted statement runs.

There are four protections, each by another part of Linux:

    limits        setrlimit(2): CPU time, address space, file size, open descriptors, no core file
    capabilities  capset(2): all are dropped, so root's process has no privileges
    landlock      landlock(7): read the interpreter's library, read and write the process's folder, access no other
                  file; no TCP, signals and abstract sockets if the kernel's version supports these rules
    seccomp       seccomp(2): only the system calls of `seccomp.py`

None needs privileges. The last two need PR_SET_NO_NEW_PRIVS, which is also set. All are inherited and irreversible.

The subtle part is the library. A Landlock rule allows access to everything below a folder, but the folder of the
standard library also holds `site-packages` and `lib-dynload` (machine code). So the folder may be listed, and each of
its other entries may be read. The zygote builds the rules once; each process applies them in one call.

Three things stay possible. stat reveals existence, size and age of a file (Landlock does not restrict it). uname and
sysinfo reveal the machine's name, load and memory. A program can time the processor's caches.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from whorl.sandbox import seccomp

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
SIGKILL = 9
# Stands for the pid in a filter that is built before the process exists; no pid is this large.
PLACEHOLDER_PID = 0x7F5A3C69
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446  # the same on both architectures
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 13
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE
WORK_FOLDER_RIGHTS = FILE_RIGHTS | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER
ConfinementCall = tuple[str, Callable[..., int], tuple[Any, ...]]  # protection, function, arguments
EXCLUDED_ENTRIES = {"lib-dynload", "site-packages", "dist-packages"}


class ProtectionUnavailable(Exception):
    """A protection that this machine does not support: its name and the reason."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


def _supported_file_rights(version: int) -> int:
    """Return the mask of file rights that a version of Landlock can restrict."""
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return (1 << bits) - 1


@dataclass
class Confinement:
    """A set of protections, prepared once in the zygote and applied by each process.

    Args:
        folder: the only writable folder.
        allow_missing: names of protections that may be missing.

    Raises:
        ProtectionUnavailable: a protection is not supported and not in `allow_missing`.
    """

    folder: Path
    allow_missing: frozenset[str]

    def __post_init__(self) -> None:
        self.machine = platform.machine()
        libc = ctypes.CDLL(None, use_errno=True)
        self.syscall: Callable[..., int] = libc.syscall
        self.prctl: Callable[..., int] = libc.prctl
        self.setrlimit: Callable[..., int] = libc.setrlimit
        # Held here, because the zygote then hides ctypes from the programs (`hide_modules`).
        self._size, self._errno = ctypes.c_size_t, ctypes.get_errno
        self.filter_pids: list[ctypes.c_uint32] = []
        self.filters: dict[bool, Any] = {}
        if self.machine in seccomp.ARCHITECTURES:
            self.filters = {threads: self._seccomp_filter(threads) for threads in (False, True)}
        elif "seccomp" not in self.allow_missing:
            raise ProtectionUnavailable("seccomp", f"no system call list for {self.machine}")
        self.version = self.syscall(LANDLOCK_CREATE, None, self._size(0), 1)
        self.base_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        self.landlock_ruleset = self.read_only_ruleset = -1
        self.replace_rulesets()

    def replace_rulesets(self) -> None:
        """Build the Landlock rulesets for the folder that now has the name `folder`."""
        for rules in {self.landlock_ruleset, self.read_only_ruleset} - {-1}:
            os.close(rules)
        self._prepared: dict[tuple[float, int, int, bool], list[ConfinementCall]] = {}
        self.landlock_ruleset = self._build_if_supported("landlock", self._landlock_ruleset, -1)
        self.read_only_ruleset = self._build_if_supported(
            "landlock", lambda: self._landlock_ruleset(read_only=True), -1
        )

    def _build_if_supported(self, name: str, make: Callable[[], int], otherwise: int) -> int:
        try:
            return make()
        except ProtectionUnavailable:
            if name not in self.allow_missing:
                raise
            return otherwise

    def prepare(
        self, cpu_seconds: float, memory_bytes: int, file_bytes: int, threads: bool
    ) -> list[ConfinementCall]:
        """Return the calls that confine a process, for `apply`. Those of the last limits are kept."""
        limits = (cpu_seconds, memory_bytes, file_bytes, threads)
        if limits not in self._prepared:
            self._prepared = {limits: self._confinement_calls(*limits)}
        return self._prepared[limits]

    def _confinement_calls(
        self, cpu_seconds: float, memory_bytes: int, file_bytes: int, threads: bool
    ) -> list[ConfinementCall]:
        """Return (protection, function, arguments) in order. Each function returns 0 if it succeeds."""
        calls: list[ConfinementCall] = []
        for kind, limit in (
            (resource.RLIMIT_CPU, ceil(cpu_seconds)),  # soft = hard: the kernel kills without a handler
            (resource.RLIMIT_AS, self.base_bytes + memory_bytes),
            (resource.RLIMIT_FSIZE, file_bytes),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            calls.append(("limits", self.setrlimit, (kind, struct.pack("<QQ", limit, limit))))
        calls.append(("seccomp", self.prctl, (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)))
        if os.geteuid() == 0 and self.machine in CAPSET:
            header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
            calls.append(("capabilities", self.syscall, (CAPSET[self.machine], header, bytes(24))))
        rules = self.landlock_ruleset if file_bytes else self.read_only_ruleset
        if rules >= 0:
            calls.append(("landlock", self.syscall, (LANDLOCK_RESTRICT, rules, 0)))
        if self.filters:
            pointer = self.filters[threads]
            calls.append(("seccomp filter", self.prctl, (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, pointer, 0, 0)))
        return calls

    def apply(self, calls: list[ConfinementCall]) -> None:
        """Confine the calling process. After a ProtectionUnavailable error no program may run.

        A fork copies each page that it changes, and running a function changes some. So this only makes the calls that
        `prepare` returned before the fork.
        """
        pid = os.getpid()
        for place in self.filter_pids:
            place.value = pid
        for name, call, arguments in calls:
            if call(*arguments) and not (name == "seccomp filter" and "seccomp" in self.allow_missing):
                raise ProtectionUnavailable(name, os.strerror(self._errno()))

    def die_with_parent(self, parent: int) -> None:
        """Make the kernel kill this process when its parent ends. Exit at once if the parent has already ended."""
        self.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    def _check_call(self, name: str, result: int) -> int:
        if result < 0:
            raise ProtectionUnavailable(name, os.strerror(self._errno()))
        return result

    def _seccomp_filter(self, threads: bool) -> Any:
        """Return a pointer to a filter (struct sock_fprog). `apply` writes its pid into `filter_pids`."""
        code = seccomp.seccomp_filter(self.machine, PLACEHOLDER_PID, threads)
        array = (ctypes.c_char * len(code)).from_buffer_copy(code)
        placeholder, at = struct.pack("<I", PLACEHOLDER_PID), -1
        while (at := code.find(placeholder, at + 1)) >= 0:
            self.filter_pids.append(ctypes.c_uint32.from_buffer(array, at))
        header = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(array))
        return (ctypes.c_char * len(header)).from_buffer_copy(header)

    def _landlock_ruleset(self, read_only: bool = False) -> int:
        """Return the descriptor of a Landlock ruleset: read the library, read and (by default) write the folder."""
        version = self.version
        if version < 1:  # -1: not supported or disabled
            raise ProtectionUnavailable("landlock", "needs Linux 5.13 or later with Landlock enabled")
        known = _supported_file_rights(version)
        fields = [known, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # files; TCP; scopes
        attributes = struct.pack(f"<{len(fields)}Q", *fields)
        rules = self._check_call(
            "landlock", self.syscall(LANDLOCK_CREATE, attributes, self._size(len(attributes)), 0)
        )
        folder_rights = READ_FILE | READ_DIR if read_only else WORK_FOLDER_RIGHTS
        for path, rights in [
            *_stdlib_rules(),
            (self.folder, folder_rights),
            (Path(os.devnull), READ_FILE | WRITE_FILE),
        ]:
            rights &= known & (~0 if path.is_dir() else FILE_RIGHTS)
            try:
                at = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ENOENT:
                    continue
                raise
            rule = struct.pack("<Qi", rights, at)
            self._check_call("landlock", self.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0))
            os.close(at)
        return rules


def stdlib_paths() -> list[str]:
    """Return the folders of the standard library's modules."""
    return sorted({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})


def _stdlib_rules() -> Iterator[tuple[Path, int]]:
    for folder in (Path(p) for p in stdlib_paths()):
        yield folder, READ_DIR
        for entry in folder.iterdir():
            if entry.name not in EXCLUDED_ENTRIES:
                yield entry, READ_FILE | READ_DIR
    for path in sys.path:
        if path.endswith(".zip"):
            yield Path(path), READ_FILE
