"""Check the facts that README and docs state about the repository: links, files, commands, figures, excerpts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from whorl.cli import build_app
from whorl.recipes import load_recipe, ready_recipes
from whorl.recipes.registry import step_kinds

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "whorl"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml|json|jsonl|js|html|h|cpp|png))`")
SETTING = re.compile(r"`(?:--set )?([a-z_]+)\.([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:=[^`]*| = [^`]*)?`")  # a step's
MADE_BY_RUNS = ("artifacts/", "metrics/", "runs/", ".whorl/", "notes", "small/", "v1/")  # by a user's run
each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return FENCE.sub("", text)


@each_page
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if not target.startswith(("http", "#", "mailto:")):
            assert (page.parent / target.split("#")[0]).exists(), f"{page.name} links to {target}"


@each_page
def test_named_files_exist(page: Path) -> None:
    for name in FILE_NAME.findall(without_code(text_of(page))):
        if name.startswith(MADE_BY_RUNS) or any(part.isupper() for part in name.split("/")):
            continue
        places = (ROOT, ROOT / "src", PACKAGE, PACKAGE / page.stem, page.parent)
        assert any((place / name).exists() for place in places), f"{page.name} names {name}"


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Calls of a program in fenced blocks and in inline code, as words; placeholders in capitals stay."""
    prose = without_code(text)
    fences = "\n".join(body for language, body in FENCE.findall(text) if language in ("bash", ""))
    call = rf"(?:\.venv/bin/)?{program} "
    calls = re.findall(rf"^\s*{call}(.*)$", fences, re.MULTILINE)
    calls += re.findall(rf"`{call}([^`]+)`", prose) + re.findall(rf"^    {call}(.*)$", prose, re.MULTILINE)
    for line in calls:
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for end in ("|", ">", "&&", ";", "&"):
            words = words[: words.index(end)] if end in words else words
        yield words


@each_page
def test_whorl_commands_parse(page: Path) -> None:
    app: Any = typer.main.get_command(build_app())
    for words in commands(text_of(page), "whorl"):
        if not words or words[0].startswith("-") or words[0].isupper():
            continue
        command: Any = app
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, f"{page.name}: there is no `whorl {' '.join(words)}`"
            command, words = command.commands[words[0]], words[1:]
        options = command.get_params(typer.Context(command))
        if command.name == "launch":  # passes the others on
            options += app.commands["run"].get_params(typer.Context(command))
        known = {name for option in options for name in (*option.opts, *option.secondary_opts)}
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, f"{page.name}: {command.name} has no {used - known}"
        if command.name == "run" and words and words[0] in ready_recipes():
            sets = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "--set"]
            model = next((words[n + 1] for n, word in enumerate(words[:-1]) if word == "--from"), "")
            sets = [s for s in sets if "..." not in s and not s.split("=")[0].isupper()]
            load_recipe(words[0], sets=sets, model=model)


@each_page
def test_python_scripts_exist(page: Path) -> None:
    for words in commands(text_of(page), "python"):
        if words and words[0].endswith(".py") and "/" in words[0]:
            placeholder = any(part.isupper() for part in Path(words[0]).with_suffix("").parts)
            assert placeholder or (ROOT / words[0]).is_file(), f"{page.name}: {words[0]}"


@each_page
def test_excerpts_are_verbatim(page: Path) -> None:
    marked = re.compile(r"<!-- source: (\S+) -->\n```python\n(.*?)```", re.DOTALL)
    for source, excerpt in marked.findall(text_of(page)):
        assert excerpt in text_of(ROOT / source), f"{page.name}: {source} has no such lines"


def test_example_of_the_engine_runs() -> None:
    language, code = FENCE.findall(text_of(ROOT / "docs" / "engine.md"))[0]
    names: dict[str, Any] = {}
    exec(code, names)
    assert language == "python" and len(names["output"]) == 20


def rounded_alike(shown: str, value: float) -> bool:
    """Whether a printed number is `value` rounded to the digits that it shows."""
    digits = shown.replace(",", "")
    decimals = len(digits.partition(".")[2])
    value = float(value)
    return abs(float(digits) - value) <= 0.5 * 10**-decimals + 1e-9 or float(digits) == float(f"{value:.3g}")


def test_readme_figures_equal_results() -> None:
    from bench._run import column_of

    row = r"^\| ([^|]+) \| ([\d,.]+) \| ([\d,.]+) \([^|]+\) \| ([\d.]+) \| `(bench/[^`]+)` \|$"
    rows = re.findall(row, text_of(ROOT / "README.md"), re.MULTILINE)
    assert len(rows) == 7
    files = (ROOT / "bench" / "results").glob("*.jsonl")
    ordered = sorted(files, key=lambda path: path.name != "transcribed.jsonl")
    lines = [json.loads(line) for path in ordered for line in text_of(path).splitlines()]
    columns = {"*": "Zen 4", "†": "AMX"}  # of the footnotes; no mark: Zen 5
    for what, *figures, script in rows:
        column = next((name for mark, name in columns.items() if what.endswith(mark)), "Zen 5")
        fits = any(
            record["script"] == script
            and column_of(record.get("machine")) == column
            and all(map(rounded_alike, figures, (record["ours"], record["peer"], record["ratio"])))
            for record in lines
        )
        assert fits, f"README: {what} {figures} is no figure of {script} on {column} in bench/results"


def has_field(kind: Any, path: list[str]) -> bool:
    """Whether a type, or a member of a union, has the field; keys of a mapping are free."""
    if not path or kind is Any or getattr(kind, "__origin__", kind) is dict:
        return True
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        field = kind.model_fields.get(path[0])
        return field is not None and has_field(field.annotation, path[1:])
    return any(has_field(member, path) for member in get_args(kind))


@each_page
def test_named_settings_exist(page: Path) -> None:
    steps = step_kinds()
    for step, path in re.findall(
        r"`(?:--set )?([a-z_]+)\.([a-z_0-9]+(?:\.[a-z_0-9]+)*)(?:=[^`]*| = [^`]*)?`", text_of(page)
    ):
        if step in steps and path not in ("js", "json", "length", "png", "py", "safetensors"):
            assert has_field(steps[step].config, path.split(".")), f"{page.name} names {step}.{path}"


def test_benchmarks_page_is_generated() -> None:
    from bench.report import PAGE, load_results, page

    assert PAGE.read_text(encoding="utf-8") == page(load_results()), "run python bench/report.py"


def test_every_doc_page_is_reachable_from_the_index() -> None:
    index = text_of(ROOT / "docs" / "README.md")
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"({name})" in index, f"docs/README.md does not link {name}"
