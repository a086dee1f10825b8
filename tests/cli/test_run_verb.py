"""The last lines of `whorl run`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from whorl.cli.jobs.run import closing_lines
from whorl.recipes.steps.evaluation.generations import nearest_to_real_code


def artifact(kind: str, name: str, *files: str, **fields: Any) -> Any:
    defaults = {"path": Path("store", name), "file": Path, "summary": {}, "parents": {}, "address": name}
    return SimpleNamespace(**{"kind": kind, "name": name, "files": files, **defaults, **fields})


def test_next_commands_sample_evaluated_and_last_model() -> None:
    models = [artifact("model", "r/pretrain"), artifact("model", "r/sft")]
    artifacts = [artifact("tokens", "r/tokens"), *models, artifact("report", "r/report", "report.html")]
    paths = ["model:  r/pretrain: store/r/pretrain", "model:  r/sft: store/r/sft", "report: report.html"]
    assert closing_lines(artifacts, " --store s") == [
        *paths, 'next:   whorl sample r/sft "..." --store s', "        whorl serve r/sft --store s",
    ]  # fmt: skip
    summary = {"completions": {"prompts": 64, "nearest": "def f(x):\n    return x"}}
    measured = artifact("evaluation", "r/evaluate", summary=summary, parents={"model": "r/pretrain"})
    assert closing_lines([*artifacts, measured], "") == [
        "of 64 completed held-out functions, the one nearest to the real code:", "    def f(x):", "        return x", *paths,
        'next:   whorl sample r/pretrain "..."', '        whorl sample r/sft "..."', "        whorl serve r/pretrain",
    ]  # fmt: skip
    assert closing_lines([artifacts[3]], "") == ["report: report.html"]
    assert closing_lines(artifacts[:1], "") == ["next:   whorl show r/tokens"]


def test_next_command_uses_sampled_prompt(tmp_path: Path) -> None:
    one = {"prompt": "1+2\n", "answer": "3", "passed": True, "reward": 1.0, "reason": ""}
    (tmp_path / "samples.json").write_text(json.dumps({"before": [one], "after": [one]}))
    made = artifact("model", "r/rl", "samples.json", file=lambda name: tmp_path / name)
    assert closing_lines([made], "")[-2] == r"next:   whorl sample r/rl $'1+2\n'"


def test_next_command_has_a_prompt_of_the_data() -> None:
    prompts = {"tasks": "12+3=", "pretrain": "The keeper", "long": "x" * 61}
    made = {n: artifact("data", n, summary={"sample_prompt": prompt}) for n, prompt in prompts.items()}
    base = artifact("model", "r/base", parents={"tokens": "pretrain"})
    for parents, prompt in (
        ({"model": "r/base", "data": "tasks"}, "12+3="), ({"data": "long", "model": "pretrain"}, "The keeper"), ({}, "...")
    ):  # fmt: skip
        tuned = artifact("model", "r/tuned", parents=parents)
        assert (
            closing_lines([*made.values(), base, tuned], "")[-2] == f'next:   whorl sample r/tuned "{prompt}"'
        )


def test_next_command_names_a_program_that_is_not_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "whorl"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr("sys.argv", [str(program), "run"])
    monkeypatch.setenv("PATH", "")
    tokens = artifact("tokens", "r/tokens")
    assert closing_lines([tokens], "") == [f"next:   {program} show r/tokens"]
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    assert closing_lines([tokens], "") == ["next:   whorl show r/tokens"]


@pytest.mark.parametrize(
    ("text", "shown"), [("It\nrained", ["It", "rained"]), ("x" * 900, ["x" * 600 + " ..."])]
)
def test_prose_ends_with_its_first_sample(tmp_path: Path, text: str, shown: list[str]) -> None:
    samples = [{"prompt": text[:3], "tokens": [{"hex": text[3:].encode().hex()}]}]
    made = artifact("evaluation", "r/evaluate", file=lambda name: tmp_path / name)
    (tmp_path / "evaluation.json").write_text(json.dumps({"samples": samples}))
    assert closing_lines([made], "") == ["a sample:", *(f"    {line}" for line in shown)]
    (tmp_path / "evaluation.json").write_text(json.dumps({"samples": []}))
    assert closing_lines([made], "") == ["next:   whorl show r/evaluate"]


def test_shown_completion_is_the_nearest_to_the_real_code() -> None:
    def shown(*rows: tuple[str, str, str]) -> str | None:
        items = [
            SimpleNamespace(fields={"header": "    def f(self):\n", "body": real}) for real, _, _ in rows
        ]
        results = [SimpleNamespace(outcome=o, details={"extracted": [body]}) for _, body, o in rows]
        return nearest_to_real_code(SimpleNamespace(items=items), SimpleNamespace(items=results))  # type: ignore[arg-type]

    rows = [
        ("        return self.x\n", "        pass\n", "right"),
        ("        return self.y\n", "        return self.z\n", "right"),
    ]
    wrong = ("x", "", "wrong")
    assert shown(wrong, *rows) == "def f(self):\n    return self.z"
    assert shown(wrong) is None
