"""Compile C++ sources on the machine, once, for its CPU.

    WHORL_CHOOSE=cpu=torch     never; the torch path runs
    CXX                        the compiler; default: the first of g++, c++ and clang++ found

A shipped binary would target the oldest CPU or need a build for each. A source of 1,400 lines compiles with `-march=native`
in seconds to half a minute. Libraries are kept in `$XDG_CACHE_HOME/whorl/native` (`~/.cache` by default). The file name is
the hash of sources, flags, compiler version and CPU, so machines that share a home folder do not collide.

A run compiles the kernels of training in a thread while its first steps leave cores idle. The engine's library, which takes
longer and is needed later, is compiled on idle cores while training runs, by a child that ends with its parent.

The flags of a CPU may list instructions that it, its hypervisor or its emulator refuses. So a new library is tried first
in a child process, which calls its `whorl_try` if it has one. If a signal ends the child, the next flags are taken, with a
warning. A compiler too old for the CPU gives a warning too, as its code is slower.

Subtle: several processes may start at once. One compiles under a file lock of the source, which the kernel releases if it
dies; the others wait and find the file. It is written under a temporary name and renamed, so an existing file is always
complete.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from whorl.machine.kernel_choice import forced_choices

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
# Tried in turn until one compiles and runs; x86-64-v3 has AVX2.
NATIVE_FLAG = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
ARCH_FLAGS = ((NATIVE_FLAG,), ("-march=x86-64-v3",), ())
TRIAL_SECONDS = 60.0
_TRIAL = "import ctypes, sys; getattr(ctypes.CDLL(sys.argv[1]), 'whorl_try', int)()"
COMPILE_TIMEOUT_SECONDS = 300.0
STOP_SECONDS = 2.0  # for a child to remove its file; without a core it needs longer
SHARED_HEADERS = Path(__file__).parent  # which any source may include
Source = tuple[Path, tuple[str, ...]]  # a source and its flags


class BuildError(Exception):
    """The library could not be built; the message has the reason."""


def is_enabled() -> bool:
    """Whether native code may be built and used: cpu=torch is not forced."""
    return forced_choices().get("cpu") != "torch"


def cache_folder() -> Path:
    """Folder of the compiled libraries."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "whorl" / "native"


def load_library(source: Path, folder: Path, flags: tuple[str, ...] = ()) -> ctypes.CDLL:
    """Load the library of `source` from `folder`; compiles it if it is missing.

    Args:
        source: the file to compile. It may include other sources of its folder and SHARED_HEADERS.
        flags: added to COMMON_FLAGS and ARCH_FLAGS.

    Raises:
        BuildError: there is no compiler, it fails, or its output cannot be loaded.
    """
    compiler = find_compiler()
    target = library_file(source, folder, flags)
    try:
        if not target.exists():
            _compile_once(compiler, source, flags, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"{target}: {error}") from error


def build_libraries(libraries: Iterable[Source]) -> None:
    """Compile those of `libraries`, (source, flags), that are missing in `cache_folder`, two at a time.

    A failure is left to `load_library`, which compiles again and raises the reason.
    """

    def build(library: Source) -> None:
        source, flags = library
        with suppress(BuildError, OSError):
            target = library_file(source, cache_folder(), flags)
            if not target.exists():
                _compile_once(find_compiler(), source, flags, target)

    if is_enabled():
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(build, libraries))


def start_builds(libraries: Iterable[Source], later: Iterable[Source] = ()) -> None:
    """Begin `build_libraries` in a thread, for which `finish_builds` waits.

    later: for `start_later_builds`.
    """
    thread = threading.Thread(target=build_libraries, args=(list(libraries),), name="native builds")
    _started.append(thread)
    thread.start()
    _later.extend(later)


def finish_builds() -> None:
    """Wait for the libraries of `start_builds`, as a compiler would slow down measurements."""
    while _started:
        _started.pop().join()


def start_later_builds() -> None:
    """Compile what `start_builds` has put off in child processes, on idle cores (`build_when_idle`)."""
    while _later and is_enabled():
        source, flags = _later.pop(0)
        command = [sys.executable, "-m", "whorl.machine.native_build", str(source), *flags]
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0,
        )  # fmt: skip
        atexit.register(_stop, child)


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End a child of `start_later_builds` and its compiler, if it still runs."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def build_when_idle(source: Path, flags: tuple[str, ...]) -> None:
    """Compile a library at the priority SCHED_IDLE, unless it exists or another process does it.

    Its lock is another one than that of `load_library`, which would wait for a process that gets no time: it compiles again.

    Raises:
        BuildError: there is no compiler, or it fails.
        OSError: the folder cannot be written.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except (AttributeError, OSError):  # not Linux, or refused in a sandbox
        os.nice(19)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the temporary file
    target = library_file(source, cache_folder(), flags)
    target.parent.mkdir(parents=True, exist_ok=True)
    with suppress(Timeout), FileLock(target.with_suffix(".idle.lock"), timeout=0):
        if not target.exists():
            _compile_into(find_compiler(), source, flags, target, same_group=True)


_started: list[threading.Thread] = []
_later: list[Source] = []


def library_file(source: Path, folder: Path, flags: tuple[str, ...] = ()) -> Path:
    """Return where the compiled library of `source` is kept, whether it exists or not.

    Raises:
        BuildError: there is no compiler.
    """
    return folder / f"{_fingerprint(find_compiler(), source, flags)}.so"


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
    raise BuildError(f"no C++ compiler ({named or 'g++, c++ or clang++'}) to build native code with")


def _fingerprint(compiler: str, source: Path, flags: tuple[str, ...]) -> str:
    """Hash of everything a compiled library depends on."""
    folders = (source.parent, SHARED_HEADERS)
    sources = [p for folder in folders for p in sorted(folder.iterdir()) if p.suffix in (".h", ".cpp")]
    parts = [
        _version(compiler),
        cpu_description(),
        platform.machine(),
        repr((COMMON_FLAGS, ARCH_FLAGS, flags)),
        source.name,
    ]
    parts += [f"{p.name}\n{p.read_text()}" for p in sources]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def cpu_description() -> str:
    """Input of `-march=native`: the CPU's name and its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    prefixes = ("model name", "flags", "Features", "cpu family", "model\t")
    return "\n".join(sorted(line for line in lines if line.startswith(prefixes)))


def _compile_once(compiler: str, source: Path, flags: tuple[str, ...], target: Path) -> None:
    """Compile under a lock, unless another process does it first. Each library has its own: two sources may have one name.

    Raises:
        BuildError: the compiler fails.
        OSError: the folder cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):  # released when the process dies, too
        if not target.exists():
            _compile_into(compiler, source, flags, target)


def _killed_by(library: Path) -> str:
    """Call `whorl_try` of a library in a child process; return the signal that ended the child, or ""."""
    command = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    with suppress(subprocess.TimeoutExpired):
        code = subprocess.run(command, capture_output=True, timeout=TRIAL_SECONDS, check=False).returncode
        return signal.Signals(-code).name if code < 0 else ""
    return "a time limit"


def _compile_into(
    compiler: str, source: Path, extra: tuple[str, ...], target: Path, *, same_group: bool = False
) -> None:
    """Compile to a temporary file, then rename it.

    same_group: the compiler is in this process group and has no time limit. Else Ctrl-C does not reach it: a compiler that
    it stops would look like one that refuses the flags.

    Raises:
        BuildError: the compiler fails with all flags, or is killed.
    """
    reason, is_too_old = "", False
    group, timeout = (None, None) if same_group else (0, COMPILE_TIMEOUT_SECONDS)
    for flags in ARCH_FLAGS:
        descriptor, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
        os.close(descriptor)
        arguments = [*COMMON_FLAGS, f"-I{SHARED_HEADERS}", *extra, *flags, str(source), "-o", name]
        try:
            done = subprocess.run(
                [compiler, *arguments], capture_output=True, text=True, timeout=timeout, check=False, process_group=group
            )  # fmt: skip
            if done.returncode < 0 or "signal terminated program" in done.stderr:
                raise BuildError(
                    f"{compiler} was killed while it built {source.name} (stopped, or out of memory); the next start retries"
                )
            if done.returncode == 0 and (killed := _killed_by(Path(name))):
                reason = reason or f"code for {' '.join(flags) or 'any CPU'} was killed by {killed}"
                warnings.warn(f"{source.name}: {reason}; it is not used", RuntimeWarning, stacklevel=2)
                continue
            if done.returncode == 0:
                if is_too_old and not any("native" in flag for flag in flags):
                    built = f"{source.name} is built for {' '.join(flags) or 'any CPU'}"
                    warnings.warn(f"{built}, {compiler}: {reason}", RuntimeWarning, stacklevel=2)
                Path(name).replace(target)
                return
            lines = done.stderr.strip().splitlines()
            reason = reason or next(
                (one for one in lines if "error" in one), lines[0] if lines else "it failed"
            )
            is_too_old = True  # for these flags
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = reason or str(error)
        finally:
            Path(name).unlink(missing_ok=True)
    raise BuildError(f"{compiler} cannot build {source.name}: {reason}")


if __name__ == "__main__":
    build_when_idle(Path(sys.argv[1]), tuple(sys.argv[2:]))
