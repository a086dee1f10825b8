"""Every method is one short file on the one loop, and a run that dies continues with the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.agents import methods
from whorl.agents.methods.registration import METHODS, make_config
from whorl.agents.task import train

FILES = sorted(Path(methods.__file__).parent.glob("*.py"))
SMALL: dict[str, Any] = {"hidden": (8,), "n_envs": 2, "n_steps": 16, "steps": 640}
REPLAY = {"learning_starts": 64, "batch_size": 8, "updates_per_step": 0.1, "capacity": 400}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_method_has_no_loop_over_steps_and_no_optimizer(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"\.step\(|\.backward\(|torch\.optim|\.reset\(|\bwhile\b", text), file
    assert len(text.splitlines()) <= 200


class Dies(Exception):
    pass


@pytest.mark.parametrize("name", sorted(METHODS))
def test_run_that_dies_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    environment = (
        "CostlyGrid-v0"
        if method.needs_costs
        else "Pendulum-v1"
        if method.actions == "vectors"
        else "CartPole-v1"
    )
    replay = REPLAY if "capacity" in method.Config.model_fields else {}
    config = make_config(name, environment, **SMALL, **replay, actors=0)

    def die(progress: Any, _: Any) -> None:
        if progress.steps >= 320:
            raise Dies

    whole = train(config)
    with pytest.raises(Dies):
        train(config, die, scratch=tmp_path, checkpoint_seconds=0.0)
    lines = list[str]()
    again = train(config, scratch=tmp_path, log=lines.append)
    assert any("continues at step" in line for line in lines)
    for (key, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), key
