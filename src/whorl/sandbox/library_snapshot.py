"""The standard library as it was before a foreign program ran.

A program may cheat its tests by changing what they stand on: `unittest.TestCase.assertEqual = lambda *a: None`,
`builtins.len = ...`, `sys.modules["unittest"] = ...`, `TestCase.run.__code__ = ...`. So a picture of what tests stand on is
taken in the zygote, once: which modules are loaded and, of the modules in `GROUND`, each module's names, each class's
attributes, each function's code and defaults. (Of all modules it would take 5 ms a program: to look at an object is to
count a reference, and to write is to copy its page from the zygote.) After the
program's own statements everything is put back; after its tests the builtins and unittest are looked at again, because a
function of the program that is called by a test may do the same then. (Elsewhere the library changes by itself: caches,
what is made at first use.)

What cannot be seen here: changes in other modules, the contents of lists and dictionaries inside modules (but those of
the import system are kept), and what is put back in time by whoever changed it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

MISSING = object()
_FUNCTION_ATTRIBUTES = ("__code__", "__defaults__", "__kwdefaults__")
_VOLATILE_NAMES = {
    "__abstractmethods__",
    "_abc_impl",
    "__warningregistry__",
    "_",
}  # they change by themselves
_VOLATILE_SYS_NAMES = {
    "stdin",
    "stdout",
    "stderr",
    "last_type",
    "last_value",
    "last_traceback",
    "last_exc",
}  # so do these of sys
WATCHED_MODULES = {
    "builtins",
    "unittest",
    "json",
    "collections",
    "contextlib",
    "functools",
    "io",
    "itertools",
    "math",
    "operator",
    "random",
    "sys",
    "traceback",
}
UNWATCHED_MODULES = {
    "unittest.mock",
    "unittest.main",
    "unittest.runner",
    "unittest.async_case",
    "unittest.signals",
}


class LibrarySnapshot:
    """A picture of every module in `sys.modules` but those named in `leave_out` (with what lies below them)."""

    def __init__(self, exclude: tuple[str, ...] = ()) -> None:
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if isinstance(module, ModuleType) and name.split(".")[0] not in exclude
        }
        self.names: list[tuple[Any, Mapping[str, Any], dict[str, Any]]] = []
        self.functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self.import_paths: list[tuple[list[Any], list[Any]]] = [
            (kept, list(kept)) for kept in (sys.meta_path, sys.path_hooks, sys.path)
        ]
        self.builtins, self.saved_builtins = vars(builtins), dict(vars(builtins))
        seen: set[int] = set()
        for name, module in self.modules.items():
            if name.split(".")[0] in WATCHED_MODULES and name not in UNWATCHED_MODULES:
                self._add(module, seen)

    def _add(self, holder: Any, seen: set[int]) -> None:
        if id(holder) in seen:
            return
        seen.add(id(holder))
        live = vars(holder)
        self.names.append((holder, live, dict(live)))
        for value in list(live.values()):
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            parts = (value.fget, value.fset) if isinstance(value, property) else (value,)
            for part in parts:
                if isinstance(part, FunctionType) and id(part) not in seen and _in_watched_module(part):
                    seen.add(id(part))
                    self.functions.append((part, tuple(getattr(part, n) for n in _FUNCTION_ATTRIBUTES)))
            # Only classes made in Python can be changed; the flag is Py_TPFLAGS_IMMUTABLETYPE.
            if isinstance(value, type) and not value.__flags__ & (1 << 8) and _in_watched_module(value):
                self._add(value, seen)

    def restore_builtins(self) -> str:
        """What of builtins and unittest is not as it was: a name, or nothing. The builtins are put back.

        The loop over builtins uses none: they may be what was changed.
        """
        found = ""
        for name, value in self.saved_builtins.items():
            if self.builtins.get(name) is not value and name != "_":
                found = name
        self.builtins.update(self.saved_builtins)
        return found or next((called for called, *_ in self.changes(("unittest",))), "")

    def changes(self, packages: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, str, Any]]:
        """What is not as it was: (what to call it, holder, name, value as it was or MISSING).

        Args:
            within: names of packages to look at; none for all.
        """

        def looked_at(holder: Any) -> bool:
            home = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
            return not packages or str(home).split(".")[0] in packages

        for holder, live, kept in self.names:
            if _identical_values(live, kept) or not looked_at(holder):
                continue
            called = getattr(holder, "__qualname__", getattr(holder, "__name__", "?"))
            skip = _VOLATILE_NAMES | _VOLATILE_SYS_NAMES if holder is sys else _VOLATILE_NAMES
            for name in [n for n in live if n not in kept and n not in skip]:
                if not isinstance(live[name], ModuleType):  # a part of a package that was imported later
                    yield f"{called}.{name}", holder, name, MISSING
            for name, value in kept.items():
                if live.get(name, MISSING) is not value and name not in skip:
                    yield f"{called}.{name}", holder, name, value
        for function, was in self.functions:
            for name, value in zip(_FUNCTION_ATTRIBUTES, was, strict=True):
                if getattr(function, name) is not value and looked_at(function):
                    yield f"{function.__qualname__}.{name}", function, name, value

    def restore(self) -> None:
        """Puts everything back."""
        self.builtins.update(
            self.saved_builtins
        )  # first of all, and by a method of C: what follows calls them
        for kept, were in self.import_paths:
            kept[:] = were
        for name, module in self.modules.items():
            sys.modules[name] = module
        for _, holder, name, value in list(self.changes()):
            if isinstance(holder, ModuleType):
                # A module's dictionary is written directly: its class may have been changed.
                if value is MISSING:
                    vars(holder).pop(name, None)
                else:
                    vars(holder)[name] = value
            elif value is MISSING:
                type.__delattr__(holder, name)
            elif isinstance(holder, type):
                type.__setattr__(holder, name, value)
            else:
                setattr(holder, name, value)


def _in_watched_module(thing: Any) -> bool:
    return str(thing.__module__).split(".")[0] in WATCHED_MODULES


def _identical_values(live: Mapping[str, Any], kept: dict[str, Any]) -> bool:
    """Whether two mappings hold the very same objects; a first, quick look."""
    if len(live) != len(kept):
        return False
    get = live.get
    for name, value in kept.items():  # noqa: SIM110 (a generator would take twice as long)
        if get(name, MISSING) is not value:
            return False
    return True
