"""Snapshot of the standard library, taken before an untrusted program runs.

A program could pass its tests by changing the library under them: `unittest.TestCase.assertEqual = lambda *a: None`,
`builtins.len = ...`, `sys.modules["unittest"] = ...`, `TestCase.run.__code__ = ...`. So the zygote takes one snapshot:
the loaded modules and, for `WATCHED_MODULES`, each module's names, each class's attributes, and each function's code
and defaults. (All modules would cost 5 ms per program: reading an object counts a reference and so copies its page.)

After the program's statements everything is restored. After its tests the builtins and unittest are compared again,
because a function of the program that a test calls could change them. Other modules also change without the program,
through caches and lazy imports.

Not detected: changes in other modules, changed contents of lists and dictionaries inside modules (except those of the
import system), and changes that the program reverts in time.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

MISSING = object()
_FUNCTION_ATTRIBUTES = ("__code__", "__defaults__", "__kwdefaults__")
# Names that change without a program, in any module and in sys.
_VOLATILE_NAMES = {"__abstractmethods__", "_abc_impl", "__warningregistry__", "_"}
_VOLATILE_SYS_NAMES = {"stdin", "stdout", "stderr", "last_type", "last_value", "last_traceback", "last_exc"}
WATCHED_MODULES = {
    "builtins", "unittest", "json", "collections", "contextlib", "functools", "io", "itertools", "math", "operator",
    "random", "sys", "traceback",
}  # fmt: skip
UNWATCHED_MODULES = {
    "unittest.mock", "unittest.main", "unittest.runner", "unittest.async_case", "unittest.signals",
}  # fmt: skip


class LibrarySnapshot:
    """State of every module in `sys.modules`, except the packages in `exclude`."""

    def __init__(self, exclude: tuple[str, ...] = ()) -> None:
        self.modules = {
            name: module
            for name, module in sys.modules.items()
            if isinstance(module, ModuleType) and name.split(".")[0] not in exclude
        }
        self.names: list[tuple[Any, Mapping[str, Any], dict[str, Any]]] = []
        self.functions: list[tuple[FunctionType, tuple[Any, ...]]] = []
        self.import_paths: list[tuple[list[Any], list[Any]]] = [
            (paths, list(paths)) for paths in (sys.meta_path, sys.path_hooks, sys.path)
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
            # Only classes defined in Python can be changed; the flag is Py_TPFLAGS_IMMUTABLETYPE.
            if isinstance(value, type) and not value.__flags__ & (1 << 8) and _in_watched_module(value):
                self._add(value, seen)

    def restore_builtins(self) -> str:
        """Restore the builtins and return the name of one change in builtins or unittest, or "".

        The loop over builtins calls none of them, since they may have been replaced.
        """
        changed = ""
        for name, value in self.saved_builtins.items():
            if self.builtins.get(name) is not value and name != "_":
                changed = name
        self.builtins.update(self.saved_builtins)
        return changed or next((display_name for display_name, *_ in self.changes(("unittest",))), "")

    def changes(self, packages: tuple[str, ...] = ()) -> Iterator[tuple[str, Any, str, Any]]:
        """Yield every change as (display name, holder, name, saved value or MISSING).

        Args:
            packages: names of packages to compare; empty for all.
        """

        def selected(holder: Any) -> bool:
            home = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
            return not packages or str(home).split(".")[0] in packages

        for holder, live, kept in self.names:
            if _identical_values(live, kept) or not selected(holder):
                continue
            display_name = getattr(holder, "__qualname__", getattr(holder, "__name__", "?"))
            skip = _VOLATILE_NAMES | _VOLATILE_SYS_NAMES if holder is sys else _VOLATILE_NAMES
            for name in [n for n in live if n not in kept and n not in skip]:
                if not isinstance(live[name], ModuleType):  # skip a submodule that was imported later
                    yield f"{display_name}.{name}", holder, name, MISSING
            for name, value in kept.items():
                if live.get(name, MISSING) is not value and name not in skip:
                    yield f"{display_name}.{name}", holder, name, value
        for function, saved in self.functions:
            for name, value in zip(_FUNCTION_ATTRIBUTES, saved, strict=True):
                if getattr(function, name) is not value and selected(function):
                    yield f"{function.__qualname__}.{name}", function, name, value

    def restore(self) -> None:
        """Restore the snapshot."""
        # First, and by a C method: the next lines call builtins.
        self.builtins.update(self.saved_builtins)
        for paths, saved in self.import_paths:
            paths[:] = saved
        for name, module in self.modules.items():
            sys.modules[name] = module
        for _, holder, name, value in list(self.changes()):
            if isinstance(holder, ModuleType):
                # Written through the module's dictionary: its class may have been changed.
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
    """Return whether two mappings hold the identical objects; a fast first check."""
    if len(live) != len(kept):
        return False
    get = live.get
    for name, value in kept.items():  # noqa: SIM110 (a generator would take twice as long)
        if get(name, MISSING) is not value:
            return False
    return True
