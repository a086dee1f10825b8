"""The wheel with the base dependencies alone: every module but those of servers, and the README's Python block."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tests.support.notes import write_notes

ROOT = Path(__file__).parents[2]
SERVERS = ("serve", "router", "http", "loadtest")  # rooms that the extra `serve` is for
COPIED = "whorl.models.exchange.modeling_whorl"  # into exported folders, for programs that have transformers
CLIENTS = {
    "whorl.log.postgres",
    "whorl.log.nats",
    "whorl.log.kafka",
    "whorl.loop.capture.mariadb",
    "whorl.loop.capture.postgres",
    "whorl.loop.simulated_raters",
    "whorl.search.opensearch",
    "whorl.search.postgres",
}  # of servers
# Hides the modules in the list `argv[1]`, as if they were not installed.
BLOCKER = """\
import json, pkgutil, sys
from importlib.machinery import PathFinder
hidden = set(json.loads(sys.argv[1]))
class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
IMPORT_ALL = """\
import importlib, whorl
assert sys.argv[2] in whorl.__file__, whorl.__file__
failed = []
for module in pkgutil.walk_packages(whorl.__path__, "whorl."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        failed.append([module.name, error.name])
print(json.dumps(failed))
"""


def base_distributions() -> set[str]:
    """The names of the base dependencies and, over all levels, of what they need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: set[str] = set()
    pending = [Requirement(line).name for line in project["dependencies"]]
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in found:
            found.add(name)
            needed = [Requirement(line) for line in metadata.requires(name) or []]
            pending += [r.name for r in needed if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def blocked_modules() -> list[str]:
    """The installed modules that no base dependency brings."""
    base = base_distributions()
    owners = metadata.packages_distributions()
    return sorted(
        name
        for name, dists in owners.items()
        if name != "whorl" and not {*map(canonicalize_name, dists)} & base
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of the working tree."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as archive:
        archive.extractall(folder / "site")
    shutil.rmtree(tree)
    return folder / "site"


def run_with_wheel(wheel: Path, code: str, cwd: Path) -> str:
    """Run code outside of the clone with the wheel and the base dependencies; return what it prints."""
    names = ("HOME", "PATH", "OMP_NUM_THREADS", "TMPDIR", "XDG_CACHE_HOME")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    words = [sys.executable, "-c", BLOCKER + code, json.dumps(blocked_modules()), str(wheel)]
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, text=True, env={**environment, "PYTHONPATH": str(wheel)}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_base_package_imports_all_but_servers(wheel: Path, tmp_path: Path) -> None:
    assert {"llguidance", "fastapi", "gymnasium", "transformers"} <= set(blocked_modules())
    failed = json.loads(run_with_wheel(wheel, IMPORT_ALL, tmp_path).splitlines()[-1])
    assert {name for name, _ in failed if name.split(".")[1] not in SERVERS} == {COPIED, *CLIENTS}
    assert "whorl.serve.server" in [name for name, _ in failed]  # the blocker works


@pytest.mark.e2e
def test_readme_python_block_runs_on_base_package(wheel: Path, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    found = re.search(r"## Use it from Python\n\n```python\n(.*?)```", readme, re.S)
    assert found is not None
    block = "".join(line + "\n" for line in found[1].splitlines() if "Qwen3" not in line)
    write_notes(tmp_path, 30)
    sizes = {
        "ingest": {"sources": [str(tmp_path / "notes")], "include": ["*.txt"]},
        "curate": {"validation_bytes": 2000, "test_bytes": 2000, "max_held_out_fraction": 0.3},
        "plan": {
            "steps": 3, "d_model": 32, "n_layers": 1, "vocab_size": 320, "data.seq_len": 32, "replicas": 1,
            "compile": False, "ngram_buckets": 64,
        },
        "evaluate": {"items": 2, "samples": 1, "sample_tokens": 4, "baselines": False},
    }  # fmt: skip
    for full, short in (
        ("steps=300", "steps=3, quiet=True"),
        ('budget="2m"', f'until="evaluate", quiet=True, **{sizes!r}'),
    ):
        assert full in block
        block = block.replace(full, short)
    printed = run_with_wheel(wheel, f"import whorl\n{block}\nprint(vectors.shape, nats.item())", tmp_path)
    assert "torch.Size([2, 128])" in printed and (tmp_path / "notes-model" / "config.json").is_file()
