"""The step `agents`: content of the artifact, SIGKILL during training, errors."""

from __future__ import annotations

import json
from html import unescape
from pathlib import Path

import pytest
from tests.support.recipes.align_steps import kill_run, logs_of, run_text

from whorl.errors import ConfigError

RECIPE = """
name = "poles"
[steps.ppo]
uses = "agents"
method = "ppo"
environment = "CartPole-v1"
steps = 8192
seeds = 2
episodes = 5
run.checkpoint_seconds = 0.05
settings = { hidden = [16], n_epochs = 2 }
"""


def test_killed_run_ends_with_same_weights(tmp_path: Path) -> None:
    whole, store = run_text(RECIPE, store=tmp_path / "whole")["ppo"], tmp_path / "killed"
    for seed in (0, 1):
        kill_run(RECIPE, store, f"*/seed-{seed}/step-*")
    again = run_text(RECIPE, store=store)["ppo"]
    assert "continues at step" in logs_of(store) and "finished earlier" in logs_of(store)
    for name in ("seed-0.safetensors", "seed-1.safetensors"):
        assert again.file(name).read_bytes() == whole.file(name).read_bytes()
    first, second = (json.loads(a.file("result.json").read_text()) for a in (whole, again))
    assert first == second and len(first["returns"]) == 2 and first["settings"]["learning_rate"] > 0
    assert first["interquartile_mean"][0] > 15  # a random policy reaches 9 or 10 steps


def test_curve_page_shows_all_records(tmp_path: Path) -> None:
    artifact = run_text(RECIPE, "ppo.seeds=1", store=tmp_path)["ppo"]
    page = unescape(artifact.file("curve.html").read_text())
    drawn = json.loads(page.split('data-chart="', 1)[1].split('"><svg', 1)[0])["series"]
    assert "PPO on CartPole-v1" in page and [curve["name"] for curve in drawn] == ["seed 0"]
    assert drawn[0]["x"] == [512.0 * n for n in range(1, 17)]  # one point per record
    assert "interquartile mean" in artifact.summary["headline"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("ppo.method=sarsas", "unknown method 'sarsas'"),
        ("ppo.settings={ speed = 3 }", "ppo: speed is no setting"),
        ("ppo.settings={ exploration = { ende = 0.1 } }", "did you mean 'end'"),
        ("ppo.settings={ learning_rate = -1 }", "learning_rate is wrong"),
        ("ppo.settings={ steps = 100 }", "settings.steps has no effect"),
        ("ppo.environment=Nothing-v0", "unknown environment 'Nothing-v0'"),
    ],
)
def test_invalid_settings_leave_no_artifact(setting: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        run_text(RECIPE, setting, store=tmp_path)
    assert not [*tmp_path.glob("artifacts/*"), *tmp_path.glob("staging/*")]
