"""Every method is one short file on the one loop, and a run that gets SIGKILL continues with the same bits."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.demonstrations import demonstrations_for

from whorl.agents import imitation, meta, methods
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import METHODS, make_config
from whorl.agents.task import TrainingProgress, train
from whorl.machine.process import Channel, Child

ROOMS = (methods, imitation, meta)
FILES = sorted(
    f for room in ROOMS for f in Path(str(room.__file__)).parent.glob("*.py") if f.stem != "adaptation"
)
SMALL: dict[str, Any] = {"hidden": (8,), "n_envs": 2, "n_steps": 16, "steps": 320}  # 10 rollouts
REPLAY = {"learning_starts": 64, "batch_size": 8, "updates_per_step": 0.1, "capacity": 400}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_method_has_no_loop_over_steps_and_no_optimizer(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"\.step\(|\.backward\(|torch\.optim|\.reset\(|\bwhile\b", text), file
    assert len(text.splitlines()) <= 200


def small_config(name: str) -> MethodConfig:
    """Settings of a run of 10 rollouts in an environment that suits the method."""
    method = METHODS[name]
    suited = {"discrete": "CartPole-v1", "vectors": "Pendulum-v1", "any": "CartPole-v1"}[method.actions]
    suited = "DryLake-v0" if name == "max-entropy-irl" else suited
    environment = "CostlyGrid-v0" if method.needs_costs else "tictactoe" if method.players == 2 else suited
    replay = REPLAY if "capacity" in method.Config.model_fields else {}
    changes = {
        **SMALL,
        **replay,
        **({"simulations": 2} if method.players == 2 else {}),
        **({"n_steps": 26, "n_envs": 4, "steps": 1040} if method.needs_trials else {}),
        **({"horizon": 3, "iterations": 2} if name == "mpc" else {}),
    }
    return make_config(name, "GoalGridDemo-v0" if method.needs_trials else environment, **changes, actors=0)


def train_and_die(_: Channel, name: str, folder: Path, rollouts: int) -> None:
    """Train, and get SIGKILL after `rollouts` rollouts, as soon as there is a checkpoint."""

    config = small_config(name)

    def die(progress: TrainingProgress, _: Any) -> None:
        if progress.steps >= rollouts * config.rollout_steps:
            while not any(folder.glob("step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    train(config, die, scratch=folder, checkpoint_seconds=0.0, demonstrations=demonstrations_for(config))


@pytest.mark.parametrize("name", sorted(METHODS))
def test_killed_method_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    rollouts = random.Random(name).randrange(2, 10)
    child = Child(f"{__name__}:train_and_die", name, tmp_path, rollouts, preload=("whorl.agents.task",))
    config = small_config(name)
    whole = train(config, demonstrations=(demonstrations := demonstrations_for(config)))
    assert child.wait(60) == -signal.SIGKILL, child.exit_description()
    lines = list[str]()
    again = train(config, scratch=tmp_path, log=lines.append, demonstrations=demonstrations)
    assert any("continues at step" in line for line in lines)
    for (key, a), b in zip(whole.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), key
