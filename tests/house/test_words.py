"""The prose rules hold, and each finds what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tools.lint import words


def rules(path: str, text: str) -> list[tuple[int, str]]:
    """(line, rule) of each finding."""
    return [(hit.line, hit.rule) for hit in words.hits(path, text)]


def test_words_hold() -> None:
    found = words.count()
    assert not found, "\n".join(words.listing(found))


def test_list_runs_without_any_package(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", words.__file__, "--list", "src/whorl/errors.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 1) and "findings in" in done.stdout and not done.stderr


@pytest.mark.parametrize(
    ("prose", "rule"),
    [
        ("The engine is told the budget.", "tell"),
        ("Nobody reads it.", "nobody"),
        ("The table is made anew.", "anew"),
        ("Each scale is kept beside its block.", "beside"),
        ("The result is what the model returns.", "is what"),
        ("What the trainer keeps of a step.", "What ..."),
        ("Returns 1. Who waits is listed.", "Who ..."),
        ("A model of the house.", "house"),
        ("The page is written aside and renamed.", "aside"),
        ("a " * 36, "long sentence"),
        ("a " * 18 + "e.g. " + "A " * 18, "long sentence"),
    ],
)
def test_prose_rules_find(prose: str, rule: str) -> None:
    texts = (("a.md", prose), ("a.py", f'"""{prose}"""'), ("a.py", f"# {prose}"), ("a.js", f"// {prose}"))
    for path, text in texts:
        assert (1, rule) in rules(path, text), (path, prose)


@pytest.mark.parametrize(
    "prose",
    [
        "The scheduler assigns positions to sequences.",
        "What does a step cost?",
        "`told` is a name, and so is `what_is(what)`.",
        'The prompt is "Nobody told me what is what".',
        "A known shape compiles faster. Users who want more give `--steps`.",
        "KV stands for key and value.",
        f"{'a ' * 18}e.g. {'A ' * 10}end",
        f"{'a ' * 32}end. {'B ' * 32}end.",
    ],
)
def test_prose_rules_spare(prose: str) -> None:
    assert rules("a.md", prose) == rules("a.py", f"# {prose}") == rules("a.js", f"// {prose}") == []
    assert '"' in prose or rules("a.py", f'"""{prose}"""') == []


def test_words_are_found_across_lines_and_numbered() -> None:
    text = """'''Title.

A process of
its own holds it.
'''
x = 1  # asks the store
#        and is a comment of
#        its own
# nothing of it
"""
    assert rules("a.py", text) == [(3, "of its own"), (6, "ask"), (7, "of its own"), (9, "nothing of")]


def test_messages_are_prose_and_other_literals_data() -> None:
    text = """DATA = "she told nobody"
call("he said so")
print(f"{1} of them told")
raise ValueError("first " "nobody knows it", do=f"ask {DATA}")
parser.add_argument("--x", help="what it is told")
Widget(title="told so")
"""
    found = rules("a.py", text)
    assert {line for line, _ in found} == {3, 4, 5}
    assert {rule for line, rule in found if line == 4} == {"nobody", "know", "ask"}


def test_markdown_leaves_out_code_tables_and_links() -> None:
    long, words_of_a_cell = "x" * 141, "word " * 40
    text = f"# What it is\n\n```\ntold\n{long}\n```\n\n    told nobody\n\n| {words_of_a_cell} | {long} |\n"
    assert rules("a.md", text) == []
    assert rules("a.md", f"{long}\n[{long}](x.md)\n| told |\n") == [(1, "long line"), (3, "tell")]
    assert rules("a.md", f"- {'word ' * 20}\n- {'word ' * 20}\n") == []


def test_html_toml_and_cpp_are_read() -> None:
    page = "<p>Nobody\nis told</p><script>told</script><input placeholder='ask a model'>"
    assert rules("a.html", page) == [(1, "nobody"), (2, "ask"), (2, "tell")]
    recipe = 'about = "told"\nname = "told"\n# anew\nx = "# told"\n'
    assert rules("a.toml", recipe) == [(1, "tell"), (3, "anew")]
    assert rules("a.cpp", 'auto s = "told";  // told\n/* a\n * anew */\n') == [(1, "tell"), (3, "anew")]
    assert rules("a.js", 'const a = "told"; show("nobody is told this");\n') == [(1, "nobody"), (1, "tell")]


def test_sections_and_examples_are_no_sentence() -> None:
    entries = "\n".join(f"        name{i}: {'word ' * 12}" for i in range(4))
    columns = "\n".join(f"    {'word ' * 6}    {'word ' * 6}" for _ in range(4))
    assert rules("a.py", f'def f():\n    """Title.\n\n    Args:\n{entries}\n\n{columns}\n    """\n') == []
