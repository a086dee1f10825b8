"""Choices of kernels that a user forces, where timing would choose otherwise.

    whorl run quickstart --set kernels.attention=blocked       or a table [kernels] in a recipe: for all of its steps
    WHORL_CHOOSE=attention=blocked,head=512                    for any program

The name before "=" is one of OPERATIONS, the first word of a choice, or a pattern of whole names (`fnmatch`).
`whorl machine` lists the names with their candidates. A recipe's table is preferred to the variable.

A forced choice is part of no address: it changes the last bits of a result, as the timing does. A choice that cannot be made
is refused, never ignored: by `kernel_choice.fastest`, which has the candidates, or by `refuse_forced` where nothing is
chosen.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase

from whorl.errors import ConfigError, one_of

FORCE = "WHORL_CHOOSE"
REMEDY = f"remove it from `kernels`, from {FORCE} or from the setting"
OPERATIONS = (
    "attention", "mlp", "linear", "cross_entropy", "head", "update", "adamw", "orthogonalize", "engine_step",
    "rollout_step",
)  # fmt: skip


def forced_choices() -> dict[str, str]:
    """Return the forced choices by operation or pattern of names. A candidate may contain commas.

    Raises:
        ConfigError: a part of WHORL_CHOOSE is no `NAME=CANDIDATE`, or names no operation.
    """
    found, last = dict[str, str](), ""
    for part in filter(None, os.environ.get(FORCE, "").split(",")):
        name, equals, way = (text.strip() for text in part.rpartition("="))
        if last and not equals:
            found[last] += f", {way}"
            continue
        check_forced(FORCE, name, way)
        found[name], last = way, name
    return found


def check_forced(source: str, name: str, way: object) -> None:
    """Raise ConfigError unless a forced choice is text for an operation or a pattern. source: for the message."""
    if not (name and isinstance(way, str) and way) or "=" in name + way:
        given = f"{name} = {way!r}" if name else repr(way)
        raise ConfigError(f"{source} has {given}", expected="NAME=CANDIDATE, separated by commas")
    if name.isidentifier() and name not in OPERATIONS:
        raise ConfigError(f"{source} names {name!r}", expected=one_of(name, OPERATIONS))


def forced_candidate(name: str) -> str | None:
    """Return the candidate that a user requires for a product, or None."""
    for pattern, way in forced_choices().items():
        if pattern == name.partition(" ")[0] or fnmatchcase(name, pattern):
            return way
    return None


@contextmanager
def force_choices(choices: Mapping[str, str]) -> Iterator[None]:
    """Within the context, force these choices in this process and in the children that it starts."""
    before = os.environ.get(FORCE)
    if choices:
        merged = {**choices, **{name: way for name, way in forced_choices().items() if name not in choices}}
        os.environ[FORCE] = ",".join(f"{name}={way}" for name, way in merged.items())
    try:
        yield
    finally:
        if choices and before is None:
            os.environ.pop(FORCE, None)
        elif choices and before is not None:
            os.environ[FORCE] = before


def refuse_forced(operations: Iterable[str], reason: str, allowed: str = "") -> None:
    """Raise ConfigError if a candidate of these operations is forced where there is no choice.

    reason: for the message. allowed: the candidate that runs without a choice, if it has a name.
    """
    forced = forced_choices()
    for operation in operations:
        way = forced.get(operation)
        if way is not None and way != allowed:
            raise ConfigError(
                f"{operation}: the choice {way!r} is impossible here: {reason}",
                expected=one_of(way, [allowed]) if allowed else "no choice",
                do=REMEDY,
            )
