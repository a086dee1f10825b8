"""The result of an extraction, and the error for a missing library."""

from __future__ import annotations

from dataclasses import dataclass

from whorl.data.quarantine import BadRecordError


@dataclass(frozen=True, slots=True)
class Page:
    """The text of a page, and its title if it has one."""

    text: str
    title: str | None = None


def corpus_extra(package: str) -> BadRecordError:
    """Return the error for a missing package of the extra `corpus`."""
    return BadRecordError("not_installed", "", f"{package} is not installed: pip install 'whorl[corpus]'")
