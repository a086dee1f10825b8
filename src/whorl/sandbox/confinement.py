"""A process gives up what it will not need: for good, and before the first foreign statement runs.

Four doors are shut, each by another part of Linux, so that one left ajar is not a way out:

    limits        setrlimit(2): computing time, address space, size of a file, open descriptors, no core file
    capabilities  capset(2): none are left, so that root's process is a process like others
    landlock      landlock(7): files may be read in the interpreter's own library, read and written in the process's folder,
                  and nowhere else; TCP, signals and abstract sockets are shut where the kernel's version knows them
    seccomp       seccomp(2): the calls of `calls.py` and no others

None needs privileges; the last two need PR_SET_NO_NEW_PRIVS, which is also set. All are inherited and cannot be undone.

The subtle part is the library. Landlock's rules only ever allow, and reach everything below a folder, yet beside the
standard library's modules lie `site-packages` (what the user installed) and `lib-dynload` (libraries in machine code). So
the folder itself may be listed and each of its other entries read. The rules are made once, in the zygote; each process
then takes them on in one call.

What stays possible: to ask whether a file of a guessed name exists, how large and how old it is (Landlock does not watch
stat), to see the machine's name, load and memory (uname, sysinfo), and to use the two seconds as it likes: no defence is
made against measuring times in the processor's caches.
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

from whorl.sandbox import seccomp as calls

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 1, 22, 38, 2
SIGKILL = 9
PLACEHOLDER_PID = (
    0x7F5A3C69  # stands for the process in a filter made before it; no process has so large a number
)
LANDLOCK_CREATE, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT = 444, 445, 446  # the same on both architectures
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522

WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE = 1 << 1, 1 << 2, 1 << 3, 1 << 14
REMOVE_DIR, REMOVE_FILE, MAKE_DIR, MAKE_REG, REFER = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 13
FILE_RIGHTS = WRITE_FILE | READ_FILE | TRUNCATE
WORK_FOLDER_RIGHTS = FILE_RIGHTS | READ_DIR | REMOVE_DIR | REMOVE_FILE | MAKE_DIR | MAKE_REG | REFER
EXCLUDED_ENTRIES = {"lib-dynload", "site-packages", "dist-packages"}


class ProtectionUnavailable(Exception):
    """A protection that this machine does not give: its name and why."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


def _supported_file_rights(version: int) -> int:
    """The rights about files that a version of Landlock can watch, as a mask."""
    bits = 13 + (version >= 2) + (version >= 3) + (version >= 5)
    return (1 << bits) - 1


@dataclass
class Confinement:
    """Prepared once in the zygote, put on by each process.

    Args:
        folder: the one folder that may be written in.
        without: names of protections that are left out where the machine does not give them.

    Raises:
        Unavailable: a protection cannot be had, and is not in `without`.
    """

    folder: Path
    allow_missing: frozenset[str]

    def __post_init__(self) -> None:
        self.machine = platform.machine()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.syscall: Callable[..., int] = self.libc.syscall
        self.active: dict[str, str] = {}
        known = self.machine in calls.ARCHITECTURES
        self.filters = {
            t: calls.seccomp_filter(self.machine, PLACEHOLDER_PID, t) if known else b"" for t in (False, True)
        }
        self.version = self.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1)
        self.base_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
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

    def apply(
        self, wall_seconds: float, cpu_seconds: float, memory_bytes: int, file_bytes: int, threads: bool
    ) -> None:
        """Confines the calling process: seconds, seconds, bytes, bytes. Raises Unavailable, and then nothing may run."""
        for kind, most in (
            (
                resource.RLIMIT_CPU,
                ceil(cpu_seconds),
            ),  # soft and hard alike: the kernel kills, no handler is asked
            (resource.RLIMIT_AS, self.base_bytes + memory_bytes),
            (resource.RLIMIT_FSIZE, file_bytes),
            (resource.RLIMIT_NOFILE, 64),
            (resource.RLIMIT_CORE, 0),
        ):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        self.active["limits"] = "time, memory, files, descriptors"
        self._check_call("seccomp", self.libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        if os.geteuid() == 0 and self.machine in CAPSET:
            header = struct.pack("<Ii", CAPABILITY_VERSION, 0)
            self._check_call("capabilities", self.syscall(CAPSET[self.machine], header, bytes(24)))
        self.active["capabilities"] = "none left"
        rules = self.landlock_ruleset if file_bytes else self.read_only_ruleset
        if rules >= 0:
            self._check_call("landlock", self.syscall(LANDLOCK_RESTRICT, rules, 0))
            self.active["landlock"] = f"version {self.version}: files, {self._network_scope()}"
        try:
            self._install_seccomp(threads)
            self.active["seccomp"] = f"{len(calls.ALLOWED_SYSCALLS)} calls and no others"
        except ProtectionUnavailable:
            if "seccomp" not in self.allow_missing:
                raise

    def die_with_parent(self, parent: int) -> None:
        """The kernel kills this process when its parent ends; a parent that ended just before counts as well."""
        self.libc.prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    def _check_call(self, name: str, answer: int) -> int:
        if answer < 0:
            raise ProtectionUnavailable(name, os.strerror(ctypes.get_errno()))
        return answer

    def _install_seccomp(self, threads: bool) -> None:
        if self.machine not in calls.ARCHITECTURES:
            raise ProtectionUnavailable("seccomp", f"no list of calls for {self.machine}")
        code = self.filters[threads].replace(
            struct.pack("<I", PLACEHOLDER_PID), struct.pack("<I", os.getpid())
        )
        array = ctypes.create_string_buffer(code, len(code))
        header = struct.pack("<HxxxxxxQ", len(code) // 8, ctypes.addressof(array))  # struct sock_fprog
        holder = ctypes.create_string_buffer(header, len(header))
        self._check_call("seccomp", self.libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, holder, 0, 0))

    def _network_scope(self) -> str:
        return (
            "TCP, signals, abstract sockets"
            if self.version >= 6
            else "TCP"
            if self.version >= 4
            else "no sockets"
        )

    def _landlock_ruleset(self, read_only: bool = False) -> int:
        """A Landlock ruleset's descriptor: the library for reading, the folder for writing as well."""
        version = self.version
        if version < 1:  # -1: the call is unknown or switched off
            raise ProtectionUnavailable(
                "landlock", "needs Linux 5.13 or later, built and started with Landlock"
            )
        known = _supported_file_rights(version)
        fields = [known, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # files; TCP; scopes
        attributes = struct.pack(f"<{len(fields)}Q", *fields)
        rules = self._check_call(
            "landlock", self.syscall(LANDLOCK_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
        )
        own = READ_FILE | READ_DIR if read_only else WORK_FOLDER_RIGHTS
        for path, rights in [
            *_stdlib_rules(),
            (self.folder, own),
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
    """Where the standard library's own modules lie."""
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
