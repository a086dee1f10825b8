"""A package that is also a function: both `whorl.train(...)` and `import whorl.train.learner` work.

A sub-package and a function of one name cannot both be attributes of `whorl`. The package `whorl.train` therefore gets
this class. A call imports `whorl.api` and runs its function of that name.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any


class CallableModule(ModuleType):
    """A module whose call is the function of its name in `whorl.api`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("whorl.api"), self.__name__.rpartition(".")[2])(*args, **kwargs)
