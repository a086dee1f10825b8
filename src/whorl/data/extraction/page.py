"""The result of an extraction, and the error for a missing library."""

from __future__ import annotations

from dataclasses import dataclass

from whorl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Page:
    """The text of a page, and its title if it has one."""

    text: str
    title: str | None = None


def corpus_extra(package: str) -> ConfigError:
    """Return the error for a missing package of the extra `corpus`."""
    return ConfigError(
        f"{package} is not installed",
        expected="the extra 'corpus', which reads web archives, HTML and PDF",
        do="pip install 'whorl[corpus]'",
    )
