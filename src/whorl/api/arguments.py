"""Checks of the arguments of the Python API: a wrong type, value or path is a `ConfigError` that names the argument."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from whorl.errors import ConfigError, shorten


def invalid(name: str, value: Any, expected: str) -> ConfigError:
    """Return the error of an argument."""
    return ConfigError(f"{name} is {shorten(repr(value), 80)}", expected=expected)


@contextmanager
def checked_by_pydantic() -> Iterator[None]:
    """Raise an invalid field of a configuration as a ConfigError with its name."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or error.title
        raise invalid(name, first["input"], first["msg"].removeprefix("Value error, ").lower()) from error


def as_texts(name: str, value: Any) -> list[str]:
    """Return one text, or several, as a list.

    Raises:
        ConfigError: something else.
    """
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise invalid(name, text, "a text, or a list of texts")
    return texts


def as_path(name: str, value: Any) -> str:
    """Return a path, or another name, as text.

    Raises:
        ConfigError: another type, or no text.
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise invalid(name, value, "a name or a path")
    longest = max(map(len, str(value).encode(errors="replace").split(b"/")))
    if longest > 255:
        raise invalid(name, value, "names of at most 255 bytes in a path")
    return str(value)


def require_count(**values: Any) -> None:
    """Check that arguments are integers from 1.

    Raises:
        ConfigError: one is not; the message has its name.
    """
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise invalid(name, value, "an integer, at least 1")
