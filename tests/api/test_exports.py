"""The names that packages export: each exists, and none needs torch before its first use. The setting of OpenMP."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import whorl
from whorl.machine import fork_server

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


PRINT_SPIN_COUNT = "import os; print(os.environ.get('GOMP_SPINCOUNT'))"
CHILD = """
import whorl.cli
from whorl.machine.process import Child
child = Child("tests.support.child_entries:echo", preload=("torch",))
child.channel.recv()
child.close()
"""


def run_python(code: str, **variables: str) -> str:
    """Return what a new interpreter prints. Of OpenMP's settings it has only the given ones."""
    kept = {name: value for name, value in os.environ.items() if name not in whorl.OPENMP_WAITING}
    done = subprocess.run(
        [sys.executable, "-c", code], env=kept | variables, cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True,
    )  # fmt: skip
    return done.stdout


@pytest.mark.parametrize(
    "variables",
    [
        {}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}, {"KMP_BLOCKTIME": "1"},
        {"KMP_LIBRARY": "serial"},
    ],
    ids=lambda variables: next(iter(variables), "unset"),
)  # fmt: skip
def test_import_sets_spin_count_unless_user_did(variables: dict[str, str]) -> None:
    default = None if variables else str(whorl.SPIN_COUNT)
    printed = run_python(f"import whorl; {PRINT_SPIN_COUNT}", **variables)
    assert printed == f"{variables.get('GOMP_SPINCOUNT', default)}\n"


def test_import_after_torch_sets_no_spin_count() -> None:
    code = f"import sys; sys.modules['torch'] = sys; import whorl; {PRINT_SPIN_COUNT}"  # libgomp has read it
    assert run_python(code) == "None\n"


def test_libgomp_of_cli_children_has_the_spin_count() -> None:
    """The fork server, which the first child starts, imports torch; libgomp then prints its settings."""
    if not fork_server.available():
        pytest.skip("there is no fork server on this system")
    printed = run_python(CHILD, OMP_DISPLAY_ENV="VERBOSE")
    if "GOMP_" not in printed:
        pytest.skip("torch runs with another OpenMP library")
    assert f"GOMP_SPINCOUNT = '{whorl.SPIN_COUNT}'" in printed
