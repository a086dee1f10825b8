"""Resource limits, programs and results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from whorl.errors import ConfigError

REASON_KINDS = (
    "passed", "failed", "unverifiable", "raised", "syntax", "exited", "crashed", "memory", "time", "cpu", "output", "files",
    "threads",
)  # fmt: skip


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of one program. A program that exceeds one is killed, and the limit is its reason.

    Attributes:
        wall_seconds: from start to end.
        cpu_seconds: CPU time, rounded up, since the kernel counts whole seconds.
        memory_bytes: address space beyond that of the bare interpreter.
        file_bytes: total size of the files in its folder and of unlinked open ones; 0 forbids files. The kernel enforces
            it per file; the sum is checked up to 50 times per second. A folder counts 4352 bytes, any other entry 256.
        output_bytes: printed bytes, and as many again in reports and in the output of examples.
        processes: processes and threads, including its own. A program never gets another process. With more than 1 it
            may start threads; their number is checked 50 times per second.

    Raises:
        ConfigError: a limit is out of range.
    """

    wall_seconds: float = 2.0
    cpu_seconds: float = 2.0
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    output_bytes: int = 64 << 10
    processes: int = 1

    def __post_init__(self) -> None:
        minimum = {"wall_seconds": 0.001, "cpu_seconds": 0.001, "memory_bytes": 1 << 20, "processes": 1}
        for name in (one.name for one in fields(self)):
            value = getattr(self, name)
            if not minimum.get(name, 0) <= value < 2**50:
                raise ConfigError(
                    f"limits.{name} is {value}",
                    expected=f"a number of at minimum {minimum.get(name, 0)}, finite",
                )


@dataclass(frozen=True)
class Program:
    """A program and its checks.

    Attributes:
        source: untrusted. It runs as a module named `program`, or as `__main__` if there are no checks.
        tests: trusted source that runs afterwards, in another process, with values and handles of the program's names:
            plain asserts, functions `test_...`, classes `Test...`, unittest cases (`unit_tests.py`). Tests of which no
            assertion ran have failed.
        examples: trusted statements that run last, in order, in the process of the tests and with their names.
            `ProgramResult.example_outputs` has their output, and the caller compares it.
        files: relative path -> content of files that are in the work folder at the start. They count for `file_bytes`.
        keep_files: return the files of the work folder after the end, in `ProgramResult.files`.
    """

    source: str
    tests: str = ""
    examples: tuple[str, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    keep_files: bool = False


@dataclass(frozen=True)
class ExampleOutput:
    """Output of one example, and its exception as doctest prints it ("ValueError: why"), or None."""

    text: str
    exception: str | None = None


@dataclass(frozen=True)
class ProgramResult:
    """Result of a program.

    Attributes:
        ok: it ran to its end and its tests passed (the caller checks the output of examples).
        reason: one of REASON_KINDS, and details after a colon: "raised: ValueError: no".
        output: standard output and error up to the limit; bytes that are not UTF-8 are replaced.
        seconds: from start to end.
        example_outputs: one per example that ran.
        files: relative path -> content, if the program keeps its files; up to `file_bytes`, without links and empty folders.
        files_left_out: files that are not in `files`: beyond the limit, or with a name that UTF-8 cannot spell.
    """

    ok: bool
    reason: str
    output: str
    seconds: float
    example_outputs: tuple[ExampleOutput, ...] = ()
    files: Mapping[str, bytes] = field(default_factory=dict)
    files_left_out: int = 0

    @property
    def kind(self) -> str:
        return self.reason.split(":", 1)[0]
