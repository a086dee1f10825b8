"""Names of a package that are imported at their first use.

    __getattr__, __dir__ = lazy_exports(__name__, {"optim.optimizers": ("AdamW", "Muon")})

So `from whorl.train import AdamW` works, and `import whorl.train.config` still needs no torch. A name must not be that of
a submodule, because Python binds submodules in their package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_exports(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, for names by submodule."""
    module_of = {name: module for module, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in module_of:
            return getattr(import_module(f"{package}.{module_of[name]}"), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(module_of)
