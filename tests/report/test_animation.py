"""Animated episodes: one picture per step, bounded length, and the pictures of every built-in environment."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS
from whorl.agents.environments.trials import TrialEnvironment
from whorl.agents.methods.registration import make_config
from whorl.agents.saved_agent import value_map
from whorl.agents.search.game import GameEnvironment
from whorl.agents.task import open_method
from whorl.errors import ConfigError
from whorl.report.animation import AnimatedEpisode, record_episode

image = pytest.importorskip("PIL.Image")


def recorded(method: str, environment: str, max_steps: int, max_frames: int = 1000) -> AnimatedEpisode:
    config = make_config(method, environment, hidden=(8,))
    return record_episode(config, open_method(config)[1], max_steps=max_steps, max_frames=max_frames)


@pytest.mark.parametrize(
    "environment",
    [n for n, k in TENSOR_ENVIRONMENTS.items() if not issubclass(k, GameEnvironment | TrialEnvironment)],
)
def test_every_built_in_environment_is_drawn(environment: str) -> None:
    episode = recorded("a2c", environment, 5)
    assert episode.steps <= 5 and len(episode.frames) == episode.steps + 1
    first, last = (frame.convert("RGB").tobytes() for frame in (episode.frames[0], episode.frames[-1]))
    assert first != last


def test_long_episode_is_cut_off_and_thinned() -> None:
    episode = recorded("a2c", "Pendulum-v1", 100, max_frames=20)
    assert episode.steps == 100 and not episode.ended and 10 <= len(episode.frames) <= 21
    assert (
        "100 steps" in str(episode)
        and "cut off" in str(episode)
        and f"every {episode.stride}" in str(episode)
    )
    gif = image.open(io.BytesIO(episode.to_gif()))
    assert gif.format == "GIF" and gif.n_frames == len(episode.frames)


def test_episode_returns_what_the_environment_gave() -> None:
    episode = recorded("a2c", "CartPole-v1", 500)
    assert episode.ended and episode.total == episode.steps  # a reward of 1 per step
    again = recorded("a2c", "CartPole-v1", 500)
    assert episode.to_gif() == again.to_gif()


def test_missing_renderer_and_folder_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gymnasium")
    monkeypatch.setitem(__import__("sys").modules, "pygame", None)
    with pytest.raises(ConfigError, match="MountainCarContinuous-v0 cannot be drawn"):
        recorded("a2c", "MountainCarContinuous-v0", 3)
    with pytest.raises(ConfigError, match="cannot be written"):
        recorded("a2c", "CartPole-v1", 3).save(tmp_path / "none" / "a.gif")


def test_gymnasium_draws_other_environments() -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Lamp(gymnasium.Env[Any, Any]):
        """Turns brighter with each step, for three steps."""

        metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"], "render_fps": 5}
        observation_space, action_space = gymnasium.spaces.Box(0, 9, (1,)), gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode: str | None = None) -> None:
            self.render_mode = render_mode

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            self.steps = 0
            return np.float32([0]), {}

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            self.steps += 1
            return np.float32([self.steps]), 1.0, self.steps == 3, False, {}

        def render(self) -> Any:
            return np.full((400, 600, 3), 60 * self.steps, np.uint8) if self.render_mode else None

    gymnasium.register("Lamp-v0", Lamp)
    try:
        episode = recorded("a2c", "Lamp-v0", 10)
    finally:
        del gymnasium.registry["Lamp-v0"]
    assert (episode.steps, episode.total, episode.ended, episode.frame_ms) == (3, 3.0, True, 200)
    assert {frame.size for frame in episode.frames} == {(300, 200)}
    # gymnasium has reset the environment when the last step can be drawn, so the last picture is repeated.
    assert [frame.convert("L").getpixel((0, 0)) for frame in episode.frames] == [0, 60, 120, 120]


def test_value_map_has_values_where_steps_begin() -> None:
    config = make_config("dqn", "CliffWalking-v1", hidden=(8,))
    networks = open_method(config)[1]
    found = value_map(config, networks)
    assert found is not None and [len(row) for row in found["values"]] == [12] * 4
    assert found["values"][3][1:] == [None] * 11 and found["arrows"][3][1:] == ["C"] * 10 + ["G"]
    values = networks.values(networks.q, torch.eye(48)).mean(0).detach()
    assert found["values"][3][0] == pytest.approx(float(values[36].max()))
    assert found["arrows"][3][0] == "↑→↓←"[int(values[36].argmax())]
    config = make_config("a2c", "CartPole-v1", hidden=(8,))
    assert value_map(config, open_method(config)[1]) is None
