"""Checks of the arguments of the Python API: a wrong type, value or path is a `ConfigError` that names the argument."""

from __future__ import annotations

import operator
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
        reason = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:
            raise ConfigError(reason) from error
        raise invalid(".".join(map(str, first["loc"])), first["input"], reason.lower()) from error


def as_texts(name: str, value: Any) -> list[str]:
    """Return one text, or several, as a list.

    Raises:
        ConfigError: something else.
    """
    texts = [value] if isinstance(value, str) else list(value) if isinstance(value, Iterable) else [value]
    for text in texts:
        if not isinstance(text, str):
            raise invalid(name, text, "a text, or a list of texts")
        require_encodable(name, text)
    return texts


def require_encodable(name: str, text: str) -> None:
    """Raise ConfigError for half of a surrogate pair, which no encoding has."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(name, text[error.start], "text without lone surrogates") from error


def as_path(name: str, value: Any) -> str:
    """Return a path, or another name, as text.

    Raises:
        ConfigError: another type, or no text.
    """
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise invalid(name, value, "a name or a path")
    try:
        longest = max(map(len, os.fsencode(str(value)).split(b"/")))
    except UnicodeEncodeError as error:
        raise invalid(name, value, "a name or a path without lone surrogates") from error
    if longest > 255:
        raise invalid(name, value, "names of at most 255 bytes in a path")
    return str(value)


def as_count(name: str, value: Any, least: int = 1) -> int:
    """Return an integer of Python or NumPy.

    Raises:
        ConfigError: it is none, or below `least`.
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise invalid(name, value, f"an integer, at least {least}")
    return number
