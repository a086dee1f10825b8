"""Options and formats that several verbs share."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

if TYPE_CHECKING:
    from whorl.store import Artifact

StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store",
        metavar="STORE",
        help="Folder or URL (s3://...) of the store; else $WHORL_HOME, else .whorl here.",
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="FIELD=VALUE", help="Change a setting of the step or method; may be repeated."
    ),
]
RefArgument = Annotated[
    str,
    typer.Argument(
        metavar="ARTIFACT",
        help="A name (quickstart/tokens, or tokens if unique), or the start of an address.",
    ),
]


def open_artifact(ref: str, store: str | None, kinds: tuple[str, ...], expected: str) -> Artifact:
    """Return an artifact. Raises ConfigError: it is of another kind than `kinds`. StoreError: it does not exist."""
    from whorl.errors import ConfigError
    from whorl.store import Store

    found = Store(store).open(ref)
    if found.kind not in kinds:
        raise ConfigError(
            f"{found.name} is of the kind {found.kind}", expected=expected,
            do="list the artifacts with `whorl ls`",
        )  # fmt: skip
    return found


@contextmanager
def serve_extra(part: str = "server") -> Iterator[None]:
    """Raise ConfigError with the command that installs the extra, for a missing package. part: what needs it."""
    try:
        yield
    except ImportError as error:
        from whorl.errors import ConfigError

        raise ConfigError(
            f"the dependencies of the {part} are not installed ({error.name})", expected="the extra 'serve'",
            do="pip install 'whorl[serve]'",
        ) from error  # fmt: skip


def standard_input() -> TextIO:
    """Return the standard input. Raises ConfigError if it is closed."""
    if sys.stdin is None:
        from whorl.errors import ConfigError

        raise ConfigError("standard input is closed", do="give the text in a pipe, or as an argument")
    return sys.stdin


def format_size(n_bytes: float) -> str:
    """Return a size with its unit: `812 B`, `4.1 kB`, `31.4 MB`, `2.0 GB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n_bytes >= scale:
            return f"{n_bytes / scale:.1f} {unit}"
    return f"{n_bytes:.0f} B"


def format_time(seconds: float) -> str:
    """Return a moment in local time: `2026-11-05 14:03`."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
