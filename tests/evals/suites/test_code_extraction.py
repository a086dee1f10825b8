"""Code data from small files and from real modules of the interpreter."""

from __future__ import annotations

import ast
import difflib
import doctest
import heapq
import statistics
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from whorl.align.data.bug_injection import BUG_KINDS, bug_preferences, inject_bug
from whorl.errors import ConfigError
from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.suites.code_tasks import CodeTask, doctest_tasks, filter_solvable
from whorl.evals.suites.python_functions import PythonFunction, extract_functions

Sources = list[tuple[str, str]]  # name and text of each file
MODULE = '''\
import math
from math import sqrt as root, floor
SCALE, SHIFT = 3, 1
unused = 7

def helper(x):
    return x * SCALE

@staticmethod
def wide(a, b=2):
    """Add and scale two numbers, all the way.

    >>> wide(1, 2) + LATER
    16.0
    """
    # a comment of two words
    total = helper(a) + b
    if total == 5 and a >= 0:
        return root(total * total) + (
            b)

    return "no"

class Box:
    """A box."""

    def open(self, how):
        """Open the box, in the way that is asked for."""
        for step in how:
            self.state = f"{step} done"
        return self.state

    def nothing(self):
        """Does nothing at all, but is documented."""
        raise NotImplementedError("yet")

LATER = 9

def skewed():
    """A text that leaves the margin, which must stay as it is."""
    return """
left
"""
'''


@pytest.fixture(scope="module")
def real() -> Sources:
    modules = (statistics, textwrap, heapq, difflib)
    return [(m.__name__ + ".py", Path(m.__file__).read_text()) for m in modules]


@pytest.fixture(scope="module")
def found(real: Sources) -> list[PythonFunction]:
    return extract_functions([*real, ("made.py", MODULE)])


def named(found: list[PythonFunction], name: str) -> PythonFunction:
    return next(f for f in found if f.name == name)


def run_examples(tasks: Sequence[VerifiableTask], completions: list[str]) -> list[Grade]:
    """Run trusted code in this process and return verdicts."""
    verdicts = []
    for task, completion in zip(tasks, completions, strict=True):
        names: dict[str, object] = {}
        try:
            exec(compile(task.prompt + completion, task.id, "exec"), names)
        except Exception as error:
            verdicts.append(Grade(0.0, False, type(error).__name__))
            continue
        test = doctest.DocTestParser().get_doctest(task.answer, names, task.id, None, None)
        failed = doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed
        verdicts.append(Grade(float(not failed), not failed, "failed" if failed else ""))
    return verdicts


def test_extract_functions_split_is_lossless(found: list[PythonFunction]) -> None:
    wide, opened = named(found, "wide"), named(found, "open")
    assert wide.header.startswith("@staticmethod\ndef wide(a, b=2):\n") and wide.header.endswith('    """\n')
    assert wide.body.startswith("    # a comment") and wide.body.endswith('\n\n    return "no"\n')
    assert wide.header + wide.body in MODULE and wide.is_top
    assert opened.header.startswith("def open(self, how):\n    ") and not opened.is_top
    assert textwrap.indent(opened.header + opened.body, "    ") in MODULE
    assert "nothing" not in {f.name for f in found}
    assert len(found) > 50
    for function in found:
        (node,) = ast.parse(function.header + function.body).body
        assert isinstance(node, ast.FunctionDef) and node.name == function.name
        assert ast.get_docstring(node, clean=True) is not None
        ast.parse(function.header)  # a docstring is a body


def test_extract_functions_skips_dedented_string() -> None:
    skipped = Counter[str]()
    method = MODULE[MODULE.index("def skewed") :]
    inside = "class A:\n" + textwrap.indent(method, "    ", lambda line: line != "left\n")
    assert extract_functions([("a.py", inside)], skipped=skipped) == [] and skipped == {"not_indented": 1}


def test_extract_functions_skips_copies() -> None:
    copy = MODULE.replace("# a comment of two words", "# else")
    copy = copy.replace("a, b=2", "a,  b=2").replace("Open the", "Opens a")
    skipped = Counter[str]()
    both = extract_functions([("one.py", MODULE), ("two.py", copy)], skipped=skipped)
    assert len(both) == len(extract_functions([("one.py", MODULE)])) and skipped["copy"] == len(both)


def test_extract_functions_order_depends_on_seed(real: Sources) -> None:
    one, other = extract_functions(real, seed=1), extract_functions(real, seed=2)
    assert one == extract_functions(real[::-1], seed=1)
    assert [f.id for f in one] != [f.id for f in other] and {f.name for f in one} == {f.name for f in other}


def test_doctest_tasks_include_needed_context() -> None:
    (mined,) = doctest_tasks([("made.py", MODULE.replace("@staticmethod\n", ""))])
    prompt = mined.task.prompt
    for needed in ("from math import sqrt as root, floor", "SCALE, SHIFT = 3, 1", "def helper", "LATER = 9"):
        assert needed in prompt
    assert "import math\n" not in prompt and "unused" not in prompt and "class Box" not in prompt
    assert prompt.endswith('    """\n') and mined.task.verifier == "doctest"
    assert ">>> wide(1, 2)" in mined.task.answer
    assert run_examples([mined.task], [mined.solution])[0].passed
    assert not run_examples([mined.task], ["    return 3\n"])[0].passed


def test_doctest_tasks_are_solved_by_own_bodies(real: Sources) -> None:
    mined = doctest_tasks(real)
    kept, lost = filter_solvable(mined, run_examples)
    assert len(kept) >= max(10, 0.8 * len(mined)) and len(kept) + lost.total() == len(mined)
    wrong = [CodeTask(m.task, "    return None\n", m.file) for m in kept]
    emptied, why = filter_solvable(wrong, run_examples)
    assert not emptied and why["failed"]
    given, n = [Grade(1.0, True, "passed")] * len(kept), len(kept)
    assert filter_solvable(kept, lambda tasks, completions: given) == ([], {"passes without an answer": n})
    assert [m.task.id for m in doctest_tasks(real[::-1])] == [m.task.id for m in mined]


def test_doctest_tasks_count_skipped_functions() -> None:
    alone = (
        'from .x import y\ndef f(a):\n    """Give y of a, whatever it is.\n\n    >>> f(1)\n    2\n    """\n'
    )
    alone += "    return y(a)\n"
    huge = alone.replace("from .x import y", "y = [" + "1, " * 2000 + "]").replace("f(", "g(")
    bad = alone.replace("from .x import y", "y = abs").replace(">>> f(1)", ">>>f(1)").replace("f(a", "h(a")
    skipped = Counter[str]()
    assert doctest_tasks([("a.py", alone), ("b.py", huge), ("c.py", bad)], skipped=skipped) == []
    assert (skipped["needs_too_much"], skipped["no_examples"]) == (2, 1)


@pytest.mark.parametrize("kind", sorted(BUG_KINDS))
def test_inject_bug_changes_one_place(found: list[PythonFunction], kind: str) -> None:
    made = [(f, b) for f in found if (b := inject_bug(f, kind)) is not None]
    assert len(made) > 20
    for function, body in made:
        whole, changed = function.header + function.body, function.header + body
        if kind == "syntax":
            with pytest.raises(SyntaxError):
                ast.parse(changed)
        else:
            assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(whole))
            here, there = (Counter(map(type, ast.walk(ast.parse(s)))) for s in (whole, changed))
            assert kind not in ("variable", "constant") or here == there
            assert kind != "return" or here[ast.Return] == there[ast.Return] + 1
        lines = [a != b for a, b in zip(function.body.split("\n"), body.split("\n"), strict=True)]
        assert sum(lines) == 1 and inject_bug(function, kind) == body


def test_inject_bug_after_non_ascii_text() -> None:
    text = 'def f(a, b):\n    """Put a mark before a text."""\n    return "äöü" + a\n'
    (function,) = extract_functions([("a.py", text)])
    assert inject_bug(function, "variable") == '    return "äöü" + b\n'


def test_bug_preferences_count_kinds(found: list[PythonFunction]) -> None:
    counts = Counter[str]()
    pairs = bug_preferences(found, per_function=2, counts=counts)
    assert len(pairs) == sum(counts[k] for k in BUG_KINDS) and set(counts) >= set(BUG_KINDS)
    assert len({p.id for p in pairs}) == len(pairs)
    assert all(p.chosen != p.rejected and p.source == p.id.split(":")[0] for p in pairs)
    with pytest.raises(ConfigError, match="operator"):
        bug_preferences(found, kinds=["operators"])
