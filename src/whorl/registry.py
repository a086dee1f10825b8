"""Named implementations, found by configuration: a table of names, and "module:attribute" for those of users.

    OPTIMIZERS = Registry("optimizer", {"muon": "whorl.train.optim.optimizers:Muon", ...})
    OPTIMIZERS.get("muon"), OPTIMIZERS.get("my_package.optim:Mine")

Nothing is imported before it is used, so a recipe is checked without torch. A name of the second kind needs no entry:
every process that reads the configuration imports it, also on other machines.

Importing a module runs it. So only a recipe, a command line or a Python program may name code. A record, a task or suite
file, the file of a system and a model folder come from anyone: their names pass `check_permitted`. The permitted names
are in the environment variable WHORL_CODE, which child processes inherit.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from whorl.errors import ConfigError, one_of

PERMITTED = "WHORL_CODE"  # environment variable: names that data may use, separated by commas
CODE = re.compile(r"(?:custom:)?([^\W\d]\w*(?:\.[^\W\d]\w*)*:[^\W\d]\w*)")


class Registry:
    """See the top of this file.

    Args:
        kind: for messages, as "optimizer".
        entries: name -> "module:attribute".
    """

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind, self.entries = kind, dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def register(self, name: str, path: str) -> None:
        """Add a short name for "module:attribute", in every process that reads the configuration.

        Raises:
            ConfigError: the name is taken.
        """
        if name in self.entries:
            raise ConfigError(
                f"the {self.kind} {name!r} is registered twice: {self.entries[name]}, then {path}",
                expected="a new name", do="choose another name, or use the address in place of a name",
            )  # fmt: skip
        self.entries[name] = path

    def expected(self, name: str) -> str:
        """Return the allowed names, and the one closest to `name`."""
        return f'{one_of(name, list(self.entries))}, or "module:attribute"'

    def check(self, name: str) -> str:
        """Return `name`, for a field of a configuration (`pydantic.AfterValidator`).

        Raises:
            ValueError: it is neither an entry nor of the form "module:attribute".
        """
        if name not in self.entries and ":" not in name:
            raise ValueError(self.expected(name))
        return name

    def get(self, name: str, *, named_by: str = "") -> Any:
        """Return the implementation.

        named_by: the data that give the name, for the message; "" for a recipe, a command line or a Python program.

        Raises:
            ConfigError: no such name, it cannot be imported, or it is code that data may not name.
        """
        if name not in self.entries and ":" not in name:
            raise ConfigError(f"no {self.kind} {name!r}", expected=self.expected(name))
        if named_by and name not in self.entries:
            check_permitted(name, named_by)
        try:
            return import_attribute(self.entries.get(name, name))
        except (ImportError, AttributeError, ValueError) as error:
            raise ConfigError(
                f"the {self.kind} {name!r} cannot be imported: {error}",
                expected=self.expected(name),
                do="start in the folder of the module, or put that folder on PYTHONPATH",
            ) from error


def permit_code(*paths: str) -> None:
    """Permit data to name these functions and classes, in this process and those that it starts from now on.

    Raises:
        ConfigError: a path does not have the form module:attribute.
    """
    for path in paths:
        if CODE.fullmatch(path) is None or path.startswith("custom:"):
            raise ConfigError(f"{path!r} names no code", expected="module:attribute")
    if paths:
        known = filter(None, os.environ.get(PERMITTED, "").split(","))
        os.environ[PERMITTED] = ",".join(dict.fromkeys([*known, *paths]))


def check_permitted(path: str, named_by: str) -> None:
    """Check that data may name "module:attribute". named_by: the record, file or setting that does.

    Raises:
        ConfigError: neither a recipe nor a command line permits it.
    """
    if path not in os.environ.get(PERMITTED, "").split(","):
        raise ConfigError(
            f"{named_by} names the code {path!r}, which would run on this machine",
            expected="code that a recipe or a command line names; data may name only what Whorl brings",
            do=f'if you trust that code: code = ["{path}"] in the recipe, or `whorl --code {path} ...`',
        )


def code_named_in(value: Any) -> Iterator[str]:
    """Yield each "module:attribute" among the texts of nested tables and lists, as of a recipe."""
    if isinstance(value, str):
        if (match := CODE.fullmatch(value)) is not None:
            yield match[1]
    elif isinstance(value, Mapping):
        yield from code_named_in(list(value.values()))
    elif isinstance(value, Iterable):
        for each in value:
            yield from code_named_in(each)


def require_extra(setting: str, module: str, extra: str) -> None:
    """Check that a module of an extra is installed, without importing it.

    setting: that needs it, with its value, for the message.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{setting} needs the package {module}, which is not installed",
            expected=f"the extra {extra!r}", do=f"pip install 'whorl[{extra}]'",
        )  # fmt: skip


def import_backend(name: str, path: str, extra: str) -> Any:
    """Return the class at "module:attribute" of a back end. extra: that has its client, "" if none is needed.

    Raises:
        ConfigError: its client is not installed.
    """
    try:
        return import_attribute(path)
    except ImportError as error:
        problem = f"{name} needs a package that is not installed: {error}"
        raise ConfigError(problem, do=f"pip install 'whorl[{extra}]'") from error


def import_attribute(path: str) -> Any:
    """Return the object at "module:attribute".

    Raises:
        ValueError, ImportError, AttributeError: it does not exist.
    """
    module, colon, attribute = path.partition(":")
    if not colon:
        raise ValueError(f"{path!r} does not have the form module:attribute")
    return getattr(importlib.import_module(module), attribute)
