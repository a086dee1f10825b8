"""Error types of the package.

An error that a user can fix is a `WhorlError`. Its message names the file, record or field, the expected value, and the
next action. The command line prints that message without a traceback. Any other exception is a bug and keeps its
traceback.

This module is the lowest layer: it imports no other module of the package.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS_URL = "https://github.com/whorl-ml/whorl/blob/main/docs"  # an installed package has no docs
_NO_EXAMPLE = "?"
_SINGLE = (bool, int, float, str)
# User information of a URL, and the values of parameters that give access.
_CREDENTIALS = re.compile(
    r"""(https?://)[^\s/'"]+@|(://)[^\s/'"@:]*:[^\s/'"]*@"""
    r"""|([?&;](?:x-(?:amz|goog)-[a-z-]+|[a-z._-]*(?:key|token|secret|password)|sig|signature|pwd)=)[^\s&;#'"]+""",
    re.IGNORECASE,
)

LOST = 75  # exit code (EX_TEMPFAIL) of a process that has lost another rank: the same command continues
LOST_HELPER = 74  # the same after the loss of a helper process, such as the writer of checkpoints


class WhorlError(Exception):
    """An error that a user can fix: the problem, the expected value, and the next action.

    Args:
        `what`: one sentence that names the file, record or field, and the value found there.
        expected: the correct value or format.
        do: the command to run or the value to change.
    """

    exit_code = 1
    field: str | None = None  # of a request, for its client

    def __init__(self, what: str, *, expected: str = "", do: str = "") -> None:
        what, expected, do = map(without_credentials, (what, expected, do))
        self.what, self.expected, self.do = what, expected, do
        lines = [what]
        if expected:
            lines.append(f"  expected: {expected}")
        if do:
            lines.append(f"  do: {do}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions cross process boundaries (a producer's error is raised in its parent), so they are rebuilt from
        # parts.
        return (_rebuild, (type(self), self.what, self.expected, self.do))


def _rebuild(kind: type[WhorlError], what: str, expected: str, do: str) -> WhorlError:
    return kind(what, expected=expected, do=do)


class ConfigError(WhorlError):
    """A recipe, a configuration value or a command-line flag is wrong. Raised before any work starts."""

    exit_code = 2


class DataError(WhorlError):
    """Input data as a whole cannot be used. Single bad records go to quarantine instead."""


class NotApplicableError(DataError):
    """A step has nothing to work on in this data. A run leaves it out, with the steps that need its result."""


class StoreError(WhorlError):
    """The artifact store cannot be read or written."""


class CorruptArtifactError(StoreError):
    """A file of an artifact differs from its manifest. The file is named and never used."""


class BudgetError(WhorlError):
    """The budget is too small for the request."""


class DiskFullError(WhorlError):
    """A write failed because the disk is full. Files that were complete before stay complete."""


class ProducerError(WhorlError):
    """A producer process raised, died or hung. Carries its traceback."""


class CheckpointError(WhorlError):
    """A checkpoint cannot be loaded: it is missing, damaged, or has another shape."""


def shorten(text: str, limit: int = 200) -> str:
    """Return `text` with at most `limit` characters and an ellipsis. Errors show no more of a value that a client sent."""
    return text if len(text) <= limit else f"{text[:limit]}\u2026"


def without_credentials(text: str) -> str:
    """Return `text` with "***" for the passwords, keys and signatures of its URLs. Errors and records keep no others."""
    if "://" not in text:
        return text
    return _CREDENTIALS.sub(
        lambda found: f"{found[1] or found[2]}***@" if found[3] is None else f"{found[3]}***", text
    )


def one_of(value: str, allowed: Sequence[str]) -> str:
    """Return a phrase for `expected`: the allowed values, and the one closest to `value`."""
    import difflib

    if not allowed:
        return "nothing: there is none to choose from"
    near = difflib.get_close_matches(value, allowed, n=1)
    listing = ", ".join(allowed)
    return f"one of: {listing}" + (f" (did you mean {near[0]!r}?)" if near else "")


def nearest_divisors(number: int, wanted: int) -> str:
    """Return the divisors of a number next to `wanted`, which is none, for `expected`: "2 and 4"."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    near = [n for n in divisors if n < wanted][-1:] + [n for n in divisors if n > wanted][:1]
    return " and ".join(map(str, near))


def fields_at(model: Any, place: Sequence[int | str]) -> Mapping[str, Any]:
    """Return the fields of the table at a place of a model of pydantic; empty if it is no table of settings."""
    for part in place:
        if isinstance(part, int):  # of a list
            continue
        annotation = getattr(model.model_fields.get(part), "annotation", None)
        model = next(
            (o for o in (annotation, *typing.get_args(annotation)) if hasattr(o, "model_fields")), None
        )
        if model is None:
            return {}
    return dict(model.model_fields)


def example_setting(model: Any, error: Mapping[str, Any]) -> str:
    """Return a list or table, as TOML, that a setting accepts; "" for a single value, or one that the model refuses.

    Args:
        model: of pydantic. error: an item of `ValidationError.errors()`.
    """
    annotation: Any = model
    for part in error["loc"]:
        if isinstance(part, int):
            break
        options = [annotation, *typing.get_args(annotation)]
        table = next((o for o in options if part in getattr(o, "model_fields", ())), None)
        if table is None:
            return ""
        annotation = table.model_fields[part].annotation
    example = _example(annotation)
    is_type = error["loc"] and error["type"] not in ("value_error", "assertion_error")
    return example if is_type and example[0] in "[{" and _NO_EXAMPLE not in example else ""


def settings_error(error: Mapping[str, Any], where: str, model: Any, do: str) -> ConfigError:
    """Return the error of a setting.

    Args:
        error: an item of `ValidationError.errors()`. where: the file, task or method. model: of pydantic.
    """
    *place, last = error["loc"] or ("",)
    name = ".".join(str(part) for part in error["loc"])
    fields = fields_at(model, place)
    if error["type"] == "extra_forbidden":
        return ConfigError(f"{where}: {name} is no setting", expected=one_of(str(last), list(fields)), do=do)
    about = getattr(fields.get(str(last)), "description", None) or ""
    if error["type"] == "missing":
        return ConfigError(f"{where}: {name} is missing", expected=about, do=do)
    message, example = error["msg"].removeprefix("Value error, "), example_setting(model, error)
    if not error["loc"]:  # settings that contradict each other
        return ConfigError(f"{where}: {message}", do=do)
    expected = message[:1].lower() + message[1:] + (f", such as {example}" if example else "")
    wrong = f"{where}: {name} is wrong: {shorten(repr(error['input']))}"
    return ConfigError(wrong, expected=expected + (f" ({about})" if about else ""), do=do)


def _example(annotation: Any) -> str:
    kind, inner = typing.get_origin(annotation) or annotation, typing.get_args(annotation)
    if kind in (typing.Union, types.UnionType):
        found = [_example(option) for option in inner if option is not type(None)]
        return max(found, key=lambda text: text[0] in "[{")
    if kind is typing.Annotated:
        return _example(inner[0])
    if kind is typing.Literal:
        return json.dumps(inner[0])
    if hasattr(kind, "model_fields"):
        fields = [(n, f) for n, f in kind.model_fields.items() if f.annotation not in (None, type(None))]
        single = [(name, field) for name, field in fields if isinstance(field.default, _SINGLE)]
        chosen = [(name, field) for name, field in fields if field.is_required()] or single[:1] or fields[:1]
        return f"{{ {', '.join(f'{name} = {_field_example(field)}' for name, field in chosen)} }}"
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return f"{{ {'name' if inner[:1] == (str,) else '1'} = {_example(inner[1]) if inner else '1'} }}"
    if isinstance(kind, type) and issubclass(kind, Collection) and not issubclass(kind, str):
        return f"[{', '.join(_example(each) for each in inner or (str,) if each is not ...)}]"
    texts = dict.fromkeys((str, Path, typing.Any), '"text"')
    return {bool: "true", int: "1", float: "0.2", **texts}.get(kind, _NO_EXAMPLE)


def _field_example(field: Any) -> str:
    least = next((bound.ge for bound in field.metadata if hasattr(bound, "ge")), None)
    value = field.default if isinstance(field.default, _SINGLE) else least
    return _example(field.annotation) if value in (None, "") else json.dumps(value)
