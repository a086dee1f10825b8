"""The names that packages export: each exists, and none needs torch before its first use."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec

import pytest

LAZY = ("align", "engine", "objectives", "tokens", "train")


@pytest.mark.parametrize("package", ["nn", "models", *LAZY])
def test_exported_names_exist_and_hide_no_module(package: str) -> None:
    module = import_module(f"whorl.{package}")
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert find_spec(f"whorl.{package}.{name}") is None, f"{name} is a module, too"
    assert package not in LAZY or dir(module) == sorted(module.__all__)
    with pytest.raises(AttributeError, match=rf"'whorl\.{package}' has no attribute 'Tarin'"):
        module.Tarin  # noqa: B018


def test_packages_import_without_torch() -> None:
    names = ", ".join(f"whorl.{package}" for package in LAZY)
    code = f"import sys, {names}; from whorl.train import OptimConfig; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
