"""What a program may use, what is asked of it, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from whorl.errors import ConfigError

REASON_KINDS = (
    "passed", "failed", "raised", "syntax", "exited", "crashed", "memory", "time", "cpu", "output", "files", "threads"
)  # fmt: skip


@dataclass(frozen=True)
class ResourceLimits:
    """What one program may use. Whoever passes a limit is ended and counted under its name.

    Attributes:
        wall_seconds: from its start to its end.
        cpu_seconds: of computing; the kernel counts in whole seconds, so it is rounded up.
        memory_bytes: address space beyond that of the bare interpreter.
        file_bytes: in its folder, all files together; 0 for no file at all. One file can never be larger; the sum is looked
            at 50 times a second.
        output_bytes: that it prints, and as much again in answers.
        processes: processes and threads, its own included. It never gets another process; with more than 1 it may start
            threads, and their number is looked at 50 times a second.

    Raises:
        ConfigError: a limit that no program could keep.
    """

    wall_seconds: float = 2.0
    cpu_seconds: float = 2.0
    memory_bytes: int = 256 << 20
    file_bytes: int = 1 << 20
    output_bytes: int = 64 << 10
    processes: int = 1

    def __post_init__(self) -> None:
        least = {"wall_seconds": 0.001, "cpu_seconds": 0.001, "memory_bytes": 1 << 20, "processes": 1}
        for name in (
            "wall_seconds",
            "cpu_seconds",
            "memory_bytes",
            "file_bytes",
            "output_bytes",
            "processes",
        ):
            value = getattr(self, name)
            if not least.get(name, 0) <= value < 2**50:
                raise ConfigError(
                    f"limits.{name} is {value}",
                    expected=f"a number of at least {least.get(name, 0)}, and a finite one",
                )


@dataclass(frozen=True)
class Program:
    """A program, and what is asked of it after it ran.

    Attributes:
        source: nobody trusts it. It runs as a module named `program`, or as `__main__` when nothing is asked afterwards.
        tests: trusted source that runs afterwards and sees the program's names: plain asserts, functions `test_...`,
            unittest cases. It is not in the process while the program's own statements run.
        examples: trusted statements, run one after the other at last; what each prints is in `Outcome.printed`, and whoever
            asked compares: the process never holds what is expected.
    """

    source: str
    tests: str = ""
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExampleOutput:
    """What one example printed, and its exception as doctest writes it ("ValueError: why"), or None."""

    text: str
    exception: str | None = None


@dataclass(frozen=True)
class ProgramResult:
    """What came of a program.

    Attributes:
        ok: it ran to its end and its tests passed (what examples print is for the caller to judge).
        reason: a kind of KINDS, then a colon and particulars where there are any: "raised: ValueError: no".
        output: what it wrote to standard output and error, up to the limit; bytes that are no UTF-8 are replaced.
        seconds: from its start to its end.
        printed: one for each example that ran.
    """

    ok: bool
    reason: str
    output: str
    seconds: float
    example_outputs: tuple[ExampleOutput, ...] = ()

    @property
    def kind(self) -> str:
        return self.reason.split(":", 1)[0]
