"""Compile the native library on the machine, once, for its CPU; takes a few seconds.

    WHORL_NATIVE=0     never; the torch path runs
    CXX                the compiler; default: the first of g++, c++ and clang++ found

A shipped binary would target the oldest CPU or need a build for each. A source of 1,400 lines compiles with `-march=native`
while a model loads. Libraries are kept in `$XDG_CACHE_HOME/whorl/native` (`~/.cache` by default). The file name is the hash
of sources, flags, compiler version and CPU, so machines that share a home folder do not collide.

Subtle: several processes may start at once. One compiles under a file lock, which the kernel releases if it dies; the
others wait and find the file. It is written under a temporary name and renamed, so an existing file is always complete.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

FOLDER = Path(__file__).parent
COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-w",
    "-pthread",
    "-fno-math-errno",
    "-fno-trapping-math",
)
ARCH_FLAGS = (("-march=native",), ("-mcpu=native",), ())  # tried in turn until one compiles
COMPILE_TIMEOUT_SECONDS = 300.0


class BuildError(Exception):
    """The library could not be built; the message has the reason."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, compiled if needed; None (logged once) if the build fails or WHORL_NATIVE=0."""
    if os.environ.get("WHORL_NATIVE") == "0":
        return None
    try:
        return load_library(cache_folder())
    except BuildError as error:
        warnings.warn(f"decoding by torch: {error}", RuntimeWarning, stacklevel=2)
        return None


def is_compiled() -> bool:
    """Whether `library` need not compile, since that has been done on this machine."""
    try:
        return (cache_folder() / f"{fingerprint(find_compiler())}.so").exists()
    except BuildError:
        return False


def cache_folder() -> Path:
    """Folder of the compiled libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whorl" / "native"


def load_library(folder: Path) -> ctypes.CDLL:
    """Load the library from `folder`; compiles it if it is missing.

    Raises:
        BuildError: there is no compiler, it fails, or its output cannot be loaded.
    """
    compiler = find_compiler()
    target = folder / f"{fingerprint(compiler)}.so"
    try:
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # released on close or when the process dies
                if not target.exists():
                    compile_into(compiler, target)
        return declare_signatures(ctypes.CDLL(str(target)))
    except OSError as error:
        raise BuildError(f"{target}: {error}") from error


def find_compiler() -> str:
    """Return the path of the compiler.

    Raises:
        BuildError: no compiler was found.
    """
    named = os.environ.get("CXX")
    for name in (named,) if named else ("g++", "c++", "clang++"):
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({named or 'g++, c++ or clang++'}) to build the native step with")


def fingerprint(compiler: str) -> str:
    """Hash of everything a compiled library depends on."""
    sources = sorted(p for p in FOLDER.iterdir() if p.suffix in (".h", ".cpp"))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    parts = [version, cpu_description(), platform.machine(), repr((COMMON_FLAGS, ARCH_FLAGS))]
    parts += [f"{p.name}\n{p.read_text()}" for p in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def cpu_description() -> str:
    """Input of `-march=native`: the CPU's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    prefixes = ("model name", "flags", "Features", "cpu family", "model\t")
    return "\n".join(sorted(line for line in lines if line.startswith(prefixes)))


def compile_into(compiler: str, target: Path) -> None:
    """Compile to a temporary file, then rename it.

    Raises:
        BuildError: the compiler fails with all flags.
    """
    reason = ""
    for flags in ARCH_FLAGS:
        descriptor, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(descriptor)
        command = [compiler, *COMMON_FLAGS, *flags, str(FOLDER / "native.cpp"), "-o", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_SECONDS, check=False
            )
            if done.returncode == 0:
                Path(name).replace(target)
                return
            reason = reason or done.stderr.strip().splitlines()[0] if done.stderr.strip() else "it failed"
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = reason or str(error)
        finally:
            Path(name).unlink(missing_ok=True)
    raise BuildError(f"{compiler} cannot build the native step: {reason}")


def declare_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the argument types of the library's functions and return it."""
    p, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    for name, result, arguments in (
        ("features", i32, []),
        ("sizeof", i64, [i32]),
        ("packed_bytes", None, [p, p]),
        ("large_pages", None, [p, i64]),
        ("pack", None, [p, p, i32]),
        ("open", p, []),
        ("close", None, [p]),
        ("product", i32, [p, p, p, i64, p, i32, ctypes.c_float, i32]),
        ("step", i32, [p, p, p, p, i32]),
        ("read", None, [p, p, i64, i32]),
    ):
        function = getattr(library, f"whorl_{name}")
        function.restype, function.argtypes = result, arguments
    return library
