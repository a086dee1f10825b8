"""The family of errors, the ground every room stands on.

An error that a user can mend is a `WhorlError`: its message names the file, record or field, says what was
expected, and ends with what to do. The command line prints the message alone; any other exception is a bug of
ours and keeps its traceback.

This file is the one module below floor 0: `store` and `runs` are neighbours and may not import each other, yet
both raise these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class WhorlError(Exception):
    """Something the user can mend: what is wrong, what was expected, what to do.

    Args:
        what: one sentence that names the file, record or field, and what was found there.
        expected: what would have been right.
        do: the next thing to type or change.
    """

    exit_code = 1

    def __init__(self, what: str, *, expected: str = "", do: str = "") -> None:
        self.what, self.expected, self.do = what, expected, do
        lines = [what]
        if expected:
            lines.append(f"  expected: {expected}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process borders (producers raise in their parent): rebuild from parts.
        return (_rebuild, (type(self), self.what, self.expected, self.do))


def _rebuild(kind: type[WhorlError], what: str, expected: str, do: str) -> WhorlError:
    return kind(what, expected=expected, do=do)


class ConfigError(WhorlError):
    """A recipe, a configuration value or a command-line flag is wrong; found before any work."""

    exit_code = 2


class DataError(WhorlError):
    """Input data cannot be used (as a whole: single bad records go to quarantine instead)."""


class StoreError(WhorlError):
    """The artifact store cannot be read or written."""


class CorruptArtifactError(StoreError):
    """A file of an artifact is not what its manifest says; it is named and never used."""


class BudgetError(WhorlError):
    """The budget cannot buy what was asked for."""


class DiskFullError(WhorlError):
    """A write failed for want of space; what was whole before is still whole."""


class ProducerError(WhorlError):
    """A producer process raised, died or hung; carries its traceback."""


class CheckpointError(WhorlError):
    """A checkpoint cannot be loaded: missing, damaged, or of another shape."""


def one_of(value: str, allowed: Sequence[str]) -> str:
    """Phrase for `expected`: the allowed values, and the nearest to what was typed."""
    import difflib

    near = difflib.get_close_matches(value, allowed, n=1)
    listing = ", ".join(allowed)
    return f"one of: {listing}" + (f" (did you mean {near[0]!r}?)" if near else "")
