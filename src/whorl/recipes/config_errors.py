"""Validation of a step's settings, with errors that name the flag or the line, the setting and the expected value."""

from __future__ import annotations

import itertools
import math
import tomllib
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from whorl.errors import ConfigError, example_setting, fields_at, one_of, without_credentials


def validated_config(
    config: type[BaseModel],
    step: str,
    values: Mapping[str, Any],
    location: Callable[..., str],
    flags: Sequence[str],
) -> BaseModel:
    """Return the configuration of a step.

    Args:
        location: (path of a setting) -> the flag that set it, or its file and line.
        flags: all flags that set something in this step, for settings that contradict each other.

    Raises:
        ConfigError: an unknown setting, an invalid value, a number that is not finite, or a URL with a password.
    """
    try:
        found = config.model_validate(values)
    except ValidationError as error:
        raise _explained(error, config, step, location, flags) from error
    for path, value in _leaves(found.model_dump()):
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(
                f"{location(*path)}: {'.'.join((step, *path))} cannot be {value}", expected="a finite number"
            )
        if without_credentials(str(value)) != str(value):
            raise ConfigError(
                f"{location(*path)}: {'.'.join((step, *path))} has a URL with a password, key or signature",
                expected="a URL without it: the settings are stored with the run and with all that is made from them",
                do="pass it by the environment (AWS_ACCESS_KEY_ID, ~/.netrc), or download the files first",
            )
    return found


def _explained(
    error: ValidationError,
    config: type[BaseModel],
    step: str,
    location: Callable[..., str],
    flags: Sequence[str],
) -> ConfigError:
    first = error.errors()[0]
    path = [str(part) for part in first["loc"]]
    if first["type"] == "extra_forbidden":
        allowed = [*fields_at(config, first["loc"][:-1]), *(("uses", "parents") if len(path) == 1 else ())]
        return ConfigError(
            f"{location(*path)}: the step {step} has no setting {path[-1]!r}",
            expected=one_of(path[-1], allowed) if allowed else "",
        )
    message = first["msg"].removeprefix("Value error, ").rpartition("; expected ")[2]
    expected = f"{message[:1].lower()}{message[1:]}"
    if not path:
        where = ", ".join(flags) or location()
        return ConfigError(f"{where}: the settings of {step} contradict each other", expected=expected)
    dotted, given = ".".join([step, *path]), first["input"]
    about = config.model_fields[path[0]].description
    example = example_setting(config, first)
    whole = ".".join(
        [step, *itertools.takewhile(lambda part: not part.isdecimal(), path)]
    )  # no place in a list
    if first["type"] == "list_type" and isinstance(given, str):
        example = f'["{given}"]'
    kind = "list" if example[:1] == "[" else "table"
    if example and first["type"].startswith(("list", "tuple", "set", "frozen", "dict", "mapping", "model")):
        expected = f"a {kind}"
    return ConfigError(
        f"{location(*path)}: {dotted} cannot be {given!r}",
        expected=expected + (f" ({about})" if about else ""),
        do=f"write a {kind}: --set '{whole}={example}'" if example else "",
    )


def _leaves(values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value of nested tables with its path."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def parse_flag_value(text: str, annotation: Any) -> Any:
    """Return the value of a flag: lists, tables and quoted text as TOML, the rest as text for pydantic to convert."""
    text = text.strip()
    if text.lower() in ("none", "null") and type(None) in typing.get_args(annotation):
        return None
    if text[:1] in ("[", "{", '"', "'"):
        try:
            return tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            return text
    return text
