"""Check the facts that README and docs state about the repository: links, files, commands, figures, excerpts."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from whorl.cli import build_app
from whorl.recipes import load_recipe, ready_recipes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|md|toml|json|jsonl|js|html|h|cpp|png))`")
MADE_BY_RUNS = (
    "artifacts/",
    "metrics/",
    "runs/",
    ".whorl/",
    "notes",
    "small/",
    "v1/",
)  # files that a user's run makes


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def without_code(text: str) -> str:
    return FENCE.sub("", text)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(page))):
        if not target.startswith(("http", "#", "mailto:")):
            path = page.parent / target.split("#")[0]
            assert path.exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_named_files_exist(page: Path) -> None:
    for name in FILE_NAME.findall(without_code(text_of(page))):
        if name.startswith(MADE_BY_RUNS) or any(part.isupper() for part in name.split("/")):
            continue
        package = ROOT / "src" / "whorl"
        places = (ROOT, ROOT / "src", package, package / page.stem, page.parent)
        assert any((place / name).exists() for place in places), f"{page.name} names {name}"


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Calls of a program in fenced blocks and in inline code, as words; placeholders in capitals stay."""
    lines = [
        line
        for language, body in FENCE.findall(text)
        if language in ("bash", "")
        for line in body.splitlines()
    ]
    lines += re.findall(rf"`((?:\.venv/bin/)?{program} [^`]+)`", without_code(text))
    lines += [
        line.strip()
        for line in re.findall(rf"^    (?:\.venv/bin/)?{program} .*$", without_code(text), re.MULTILINE)
    ]
    for line in lines:
        found = re.match(rf"\s*(?:\.venv/bin/)?{program} (.*)", line)
        if not found or found[1].endswith("\\"):
            continue
        try:
            words = shlex.split(found[1], comments=True)
        except ValueError:
            continue
        for end in ("|", ">", "&&", ";", "&"):
            words = words[: words.index(end)] if end in words else words
        yield words


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_whorl_commands_parse(page: Path) -> None:
    app = typer.main.get_command(build_app())
    for words in commands(text_of(page), "whorl"):
        if not words or words[0].startswith("-") or words[0].isupper():
            continue
        command: Any = app
        while hasattr(command, "commands") and words:
            assert words[0] in command.commands, f"{page.name}: there is no `whorl {' '.join(words)}`"
            command, words = command.commands[words[0]], words[1:]
        known = {
            option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        used = {word.split("=")[0] for word in words if word.startswith("--")}
        assert used <= known | {"--help"}, f"{page.name}: {command.name} has no {used - known}"
        if command.name == "run" and words and words[0] in ready_recipes():
            sets = [words[n + 1] for n, word in enumerate(words[:-1]) if word == "--set"]
            load_recipe(words[0], sets=[s for s in sets if "..." not in s and not s.split("=")[0].isupper()])


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_scripts_exist(page: Path) -> None:
    for words in commands(text_of(page), "python"):
        if words and words[0].endswith(".py") and "/" in words[0] and not words[0].split("/")[-1].isupper():
            if any(part.removesuffix(".py").isupper() for part in words[0].split("/")):
                continue  # a placeholder such as bench/ROOM/CLAIM.py
            assert (ROOT / words[0]).is_file(), f"{page.name}: {words[0]}"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_excerpts_are_verbatim(page: Path) -> None:
    for source, excerpt in re.findall(
        r"<!-- source: (\S+) -->\n```python\n(.*?)```", text_of(page), re.DOTALL
    ):
        assert excerpt in (ROOT / source).read_text(encoding="utf-8"), (
            f"{page.name}: {source} has no such lines"
        )


def results() -> dict[str, dict[str, object]]:
    """Saved results by id; a saved line replaces a transcribed one."""
    found = {}
    folder = ROOT / "bench" / "results"
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: path.name != "transcribed.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            found[record["id"]] = record
    return found


def rounded_alike(shown: str, value: float) -> bool:
    """Whether a printed number is `value` rounded to the digits that it shows."""
    digits = shown.replace(",", "")
    decimals = len(digits.partition(".")[2])
    return abs(float(digits) - value) <= 0.5 * 10**-decimals + 1e-9 or float(digits) == float(f"{value:.3g}")


def test_readme_figures_equal_results() -> None:
    rows = re.findall(
        r"^\| ([^|]+) \| ([\d,.]+) \| ([\d,.]+) \([^|]+\) \| ([\d.]+) \| `(bench/[^`]+)` \|$",
        text_of(ROOT / "README.md"),
        re.M,
    )
    assert len(rows) == 6
    records = list(results().values())
    for what, ours, peer, ratio, script in rows:
        fits = [
            r
            for r in records
            if r["script"] == script
            and all(
                rounded_alike(a, float(b))
                for a, b in ((ours, r["ours"]), (peer, r["peer"]), (ratio, r["ratio"]))
            )  # type: ignore[arg-type]
        ]
        assert fits, f"README: {what} ({ours}, {peer}, {ratio}) is no figure of {script} in bench/results"


def test_benchmarks_page_is_generated() -> None:
    from bench.report import PAGE, load_results, page

    assert PAGE.read_text(encoding="utf-8") == page(load_results()), "run python bench/report.py"


def test_every_doc_page_is_reachable_from_the_index() -> None:
    index = text_of(ROOT / "docs" / "README.md")
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs"))
        assert name == "README.md" or f"({name})" in index, f"docs/README.md does not link {name}"
