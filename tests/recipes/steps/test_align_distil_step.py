"""The step `distil`: kinds of students, training texts, cached teacher logits, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.notes import TRAINING_RECIPE, write_notes
from tests.support.recipes.align_recipes import ARITHMETIC, INIT_MODEL, TRAINED
from tests.support.recipes.align_steps import run_text

from whorl.errors import ConfigError
from whorl.models import load_model
from whorl.report.blocks import Curve, StepReport
from whorl.tokens.token_encoder import TokenEncoder

DISTIL = f"""{INIT_MODEL}{ARITHMETIC}{TRAINED}
[steps.distil]
parents = ["trained", "sums"]
data.seq_len = 64
data.epochs = 4
lr_scale = 0.5
data.batch_size = 8
max_completion_tokens = 4
model.dtype = "float32"
"""


@pytest.fixture(scope="module", autouse=True)
def _in_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a folder with a corpus; `store` in it is shared by all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_notes(tmp_path_factory.mktemp("students")))
        yield


@pytest.mark.parametrize(
    "sets",
    [
        ("distil.student.n_layers=1",),
        ("distil.student.width_multiplier=0.5", "distil.on_policy_fraction=0.5"),
        ("distil.student.n_heads=1", "distil.student.n_kv_heads=1", "distil.texts.teacher_top_k=8"),
        ("distil.student.n_layers=1", "distil.texts.completions_from=teacher", "distil.max_completion_tokens=24"),
    ],
)  # fmt: skip
def test_distil_trains_every_kind_of_student(sets: tuple[str, ...]) -> None:
    found = run_text(DISTIL, *sets)["distil"]
    sizes = found.summary["sizes"]
    assert sizes["student"] < sizes["teacher"] and found.summary["params"]["total"] == sizes["student"]
    assert found.summary["texts"] + sum(found.summary["left_out"].values()) == 40
    assert found.summary["eval"]["teacher"]["tasks"] == 6
    assert load_model(found.path).params()["total"] == sizes["student"]
    curve = json.loads((found.path / "curve.json").read_text())
    assert curve[-1]["kl"] < curve[0]["kl"]
    drawn = [b for b in StepReport.read(found.file("report.json")).blocks if isinstance(b, Curve)]
    assert drawn[0].lines[0].y == [record["kl"] for record in curve]
    assert drawn[0].note.startswith("Divergence from the teacher")
    if "distil.on_policy_fraction=0.5" in sets:
        assert curve[0]["logprob_diff_max"] < 1e-4
    TokenEncoder.load(found.path)


def test_distil_with_given_student_and_errors() -> None:
    text = DISTIL.replace('["trained", "sums"]', '["trained", "other", "sums"]')
    other = 'steps.other = { uses = "init_model", d_model = 16, n_layers = 2, n_heads = 2, mlp_hidden = 16 }'
    text = other + text
    found = run_text(text)
    assert found["distil"].summary["sizes"]["student"] == found["other"].summary["params"]["total"]
    alone = DISTIL.replace('["trained", "sums"]', '["trained"]')
    for recipe, sets, message in (
        (text, ["distil.student.n_layers=1"], "distil has two students"),
        (DISTIL, [], "distil has no student"),
        (alone, ["distil.student.n_layers=1"], "distil has no training texts"),
        (DISTIL, ["distil.texts.teacher_top_k=4", "distil.on_policy_fraction=0.5"], "cover given texts only"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_text(recipe, *sets)


def test_cached_teacher_logits_are_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = ("distil.student.n_layers=1", "distil.texts.teacher_top_k=4")

    def interrupt(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("whorl.align.distillation.train.train_student", interrupt)
        run_text(DISTIL, *sets, store=tmp_path)
    monkeypatch.setattr("whorl.align.distillation.cached_teacher.cache_teacher_logits", interrupt)
    assert run_text(DISTIL, *sets, store=tmp_path)["distil"].summary["texts"] == 40
    with pytest.raises(KeyboardInterrupt):  # without the cache the teacher runs
        run_text(DISTIL, *sets)


def test_distil_on_pretraining_documents() -> None:
    text = f"""{TRAINING_RECIPE.replace("steps = 20", "steps = 3")}
[steps.distil]
parents = ["pretrain", "tokens"]
student.n_layers = 1
data.seq_len = 32
texts.max_examples = 20
model.dtype = "float32"
"""
    found = run_text(text)["distil"]
    assert found.summary["texts"] == 20 and "eval" not in found.summary
    bits = found.summary["bits_per_byte"]
    assert bits["after"] > 0 and "then" in found.summary["headline"]
    with pytest.raises(ConfigError, match="pretraining documents have no prompts"):
        run_text(text, "distil.on_policy_fraction=0.5")
    text = text.replace('["pretrain", "tokens"]', '["init_model", "tokens"]')
    with pytest.raises(ConfigError, match=r"init_model has a vocabulary of .* ids and .*tokens one of"):
        run_text(text.replace('name = "tiny"', INIT_MODEL))
