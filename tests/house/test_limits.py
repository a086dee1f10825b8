"""The size limits of the package hold, apart from the exceptions in `limits_allowed.json`, which may only shrink."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from tools.lint import limits
from tools.lint.limits import Violation


def parameters(where: str, value: int, reason: str = "") -> Violation:
    return Violation("parameters", where, value, reason)


def tree(root: Path, files: Mapping[str, str]) -> list[Violation]:
    """Violations of a package made of `files` below `src/whorl`."""
    for name, text in files.items():
        path = root / "src" / "whorl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return limits.measure(root)


def test_limits_hold_or_are_listed() -> None:
    errors = limits.compare(limits.measure(), limits.read_allowed())
    assert not errors, "\n".join(errors)


def test_full_and_thin_folders_are_reported(tmp_path: Path) -> None:
    files = {f"room/m{i}.py": "" for i in range(16)} | {"room/__init__.py": "", "full/__init__.py": ""}
    files |= {f"full/n{i}.py": "" for i in range(15)} | {f"full/four/n{i}.py": "" for i in range(4)}
    files |= {f"full/thin/n{i}.py": "" for i in range(3)} | {"full/thin/__init__.py": ""}
    thin = Violation("files_missing", "src/whorl/full/thin", 1)
    assert tree(tmp_path, files) == [thin, Violation("files_per_folder", "src/whorl/room", 16)]


def test_lines_of_rooms_beyond_their_budget(tmp_path: Path) -> None:
    half = "\n" * 4_150
    files = {"serve/a.py": half, "http/deep/b.py": half, "cli/c.py": "\n" * 4_021, "plan/d.py": "\n" * 9_999}
    files |= {f"http/deep/b{i}.py": "" for i in range(3)}
    assert tree(tmp_path, files) == [Violation("lines_over_budget", "cli", 1)]


def test_imports_count_modules_once_and_lazy_ones(tmp_path: Path) -> None:
    files = {"__init__.py": "", "user/__init__.py": "Name = 1"}
    files |= {f"room{i % 2}/m{i}.py": "X = 1" for i in range(15)}
    rows = [f"from whorl.room{i % 2}.m{i} import X\nimport whorl.room{i % 2}.m{i}" for i in range(14)]
    fifteen = "\n".join([*rows, "def f():\n    from whorl.room0 import m14"])
    assert tree(tmp_path, files | {"user/a.py": fifteen}) == []
    found = tree(tmp_path, {"user/a.py": f"{fifteen}\n    from . import Name"})
    assert found == [Violation("imports_per_file", "src/whorl/user/a.py", 16)]


def test_parameters_skip_self_verbs_and_kernels(tmp_path: Path) -> None:
    ten, eleven = (", ".join(f"a{i}" for i in range(n)) for n in (10, 11))
    files = {
        "room/m.py": f"class A:\n    def f(self, {ten}): ...\n    def g(self, {eleven}): ...\n"
        f"    @staticmethod\n    def h({eleven}): ...\ndef k({ten}, **more): ...\n",
        "nn/gpu/k.py": f"def kernel({eleven}): ...\n",
        "cli/artifacts/show.py": f"def show({eleven}): ...\ndef helper({eleven}): ...\n",
    }
    found = {v.where.rpartition(":")[2]: v.value for v in tree(tmp_path, files) if v.rule == "parameters"}
    assert found == {"A.g": 11, "A.h": 11, "k": 11, "helper": 11}


def test_lines_leave_out_docstring_blank_and_comment(tmp_path: Path) -> None:
    body = '    """First.\n\n    More.\n    """\n\n    # why\n' + "    x = 1\n" * 79
    found = tree(tmp_path, {"a.py": f"def short():\n{body}\ndef long():\n{body}    x = 2\n"})
    assert found == [Violation("function_lines", "src/whorl/a.py:long", 81)]


def test_class_names_are_public_and_top_level(tmp_path: Path) -> None:
    text = "class A: ...\nclass _B: ...\nclass C:\n    class D: ...\n"
    found = tree(tmp_path, {"a.py": text, "b.py": text.replace("class C", "class E")})
    assert found == [Violation("class_name", "A", 2, "whorl.a, whorl.b")]


def test_cycles_at_import_time_and_deferred_ones(tmp_path: Path) -> None:
    a = "try:\n    from whorl.b import x\nexcept ImportError:\n    pass\n"
    b = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from whorl import a\n"
    assert tree(tmp_path, {"__init__.py": "", "a.py": a, "b.py": b}) == []
    (found,) = tree(tmp_path, {"b.py": "def f():\n    import whorl.a\n"})
    assert found == Violation("deferred_cycle", "whorl.a <-> whorl.b", 2)
    (found,) = tree(tmp_path, {"b.py": "from . import a\n"})
    assert found == Violation("import_cycle", "whorl.a <-> whorl.b", 2)


def test_list_fails_on_new_grown_and_unneeded_entries() -> None:
    first, second = found = [parameters("src/a.py:f", 12), parameters("src/a.py:g", 13)]
    assert len(limits.compare(found, [])) == 2
    assert limits.compare(found, found) == []
    assert limits.compare([first], found)[0].startswith("no longer needed")
    assert limits.compare(found, [first, parameters(second.where, 12)])[0].startswith("grew from 12")
    assert limits.compare(found, [first, parameters(second.where, 20)]) == []


def test_rewrite_keeps_the_reason_of_a_moved_file() -> None:
    old = [parameters("src/a.py:f", 12, "first"), parameters("src/b.py:g", 12, "second")]
    moved, new = [parameters("src/room/a.py:f", 11, "first"), parameters("src/c.py:h", 11, "new")]
    found = [parameters(moved.where, 11), parameters(new.where, 11)]
    assert limits.rewrite(found, old, "new") == [moved, new]


def test_list_refuses_invalid_entries(tmp_path: Path) -> None:
    entry, path = {"rule": "parameters", "where": "x", "value": 11, "reason": "why"}, tmp_path / "list.json"
    cases = {"no reason": [{"reason": " "}], "unknown rule": [{"rule": "size"}], "twice": [{}, {}]}
    for message, wrong in cases.items():
        path.write_text(json.dumps([entry | change for change in wrong]))
        with pytest.raises(ValueError, match=message):
            limits.read_allowed(path)


def test_readme_has_at_most_140_lines() -> None:
    assert len((limits.ROOT / "README.md").read_text("utf-8").splitlines()) <= 140
