"""Animate an episode of a trained agent: pictures of every step, as a GIF.

Built-in environments are drawn from their observations, with Pillow. Others are drawn by gymnasium's own renderer.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from whorl.agents.environments.environment import Environment
from whorl.agents.environments.gymnasium_env import GymnasiumEnvironment
from whorl.agents.environments.registration import TENSOR_ENVIRONMENTS, make_env
from whorl.agents.methods.method import MethodConfig
from whorl.agents.methods.registration import make_method
from whorl.errors import ConfigError
from whorl.files import write_output
from whorl.tracking.seeds import derive

if TYPE_CHECKING:
    from PIL.Image import Image

WIDTH, HEIGHT = 300, 200
FRAME_MS, GRID_FRAME_MS, LAST_FRAME_MS = 40, 300, 1500
PAPER, INK, ACCENT, SOFT = "#fcfcfa", "#1d2126", "#0f6a73", "#b9c2c9"
CELLS = {"S": "#e4e5e1", "F": "#ffffff", "H": "#5d6670", "G": "#9fd3a4", "C": "#5d6670", "X": "#f3c6a5"}


@dataclass(frozen=True)
class AnimatedEpisode:
    """An animated episode. frames: every `stride`-th step, and the last."""

    frames: list[Image]
    frame_ms: int
    stride: int
    steps: int
    total: float
    ended: bool

    def __str__(self) -> str:
        end = "" if self.ended else ", cut off before its end"
        shown = f", every {self.stride} steps drawn" if self.stride > 1 else ""
        return f"{self.steps:,} steps, return {self.total:.1f}{end}{shown}"

    def to_gif(self) -> bytes:
        """Return the file; the last frame stays longer."""
        out = io.BytesIO()
        durations = [*[self.frame_ms] * (len(self.frames) - 1), LAST_FRAME_MS]
        self.frames[0].save(
            out, "GIF", save_all=True, append_images=self.frames[1:], duration=durations, loop=0
        )
        return out.getvalue()

    def save(self, path: Path) -> None:
        """Write the GIF. Raises ConfigError: the file cannot be written."""
        write_output(path, self.to_gif())


@torch.no_grad()
def record_episode(
    config: MethodConfig, networks: Any, *, max_steps: int, max_frames: int = 1000
) -> AnimatedEpisode:
    """Return one greedy episode.

    Args:
        max_steps: steps after which the episode is cut off.
        max_frames: above it, only every second, fourth, ... step is drawn.

    Raises:
        ConfigError: Pillow or a package of gymnasium's renderer is missing, or the environment draws no pictures.
    """
    envs, draw, frame_ms = _open_renderer(config.environment)
    method = make_method(config, envs.spaces)
    observation = envs.reset(derive(config.seed, "recording") % (1 << 31))
    frames, stride, total = [draw(observation[0], "start")], 1, 0.0
    for step in range(1, max_steps + 1):
        transition = envs.step(method.greedy_action(networks, observation.flatten(1)))
        total += float(transition.reward)
        ended = bool(transition.terminated | transition.truncated)
        observation = transition.observation
        if ended and isinstance(envs, GymnasiumEnvironment):  # it already shows the next episode
            frames.append(frames[-1])
        elif step % stride == 0 or ended or step == max_steps:
            frames.append(draw(transition.final_observation[0], f"step {step}, return {total:.1f}"))
        if len(frames) > max_frames and not ended:
            frames, stride = frames[::2], 2 * stride
        if ended:
            break
    envs.close()
    return AnimatedEpisode(frames, frame_ms, stride, step, total, ended)


def draws_pictures(name: str) -> bool:
    """Whether an environment has pictures, for which a package may be missing."""
    (envs := make_env(name, 1)).close()
    tables = envs.tables()
    return name in PAINTERS or isinstance(envs, GymnasiumEnvironment) or bool(tables and tables.rows)


Draw = Callable[[Tensor, str], "Image"]


def _open_renderer(name: str) -> tuple[Environment, Draw, int]:
    """Return one copy of an environment, the function from an observation and a caption to a picture, and ms per frame."""
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ConfigError("pictures need Pillow, which is not installed", do="pip install pillow") from error

    def canvas(paint: Callable[[Any, list[float]], None], observation: Tensor, caption: str) -> Image.Image:
        image = Image.new("RGB", (WIDTH, HEIGHT), PAPER)
        pen = ImageDraw.Draw(image)
        paint(pen, observation.flatten().tolist())
        pen.text((6, HEIGHT - 14), caption, fill=INK)
        return image.quantize(32)

    paint = PAINTERS.get(name)
    if paint is not None:
        return make_env(name, 1), lambda o, caption: canvas(paint, o, caption), FRAME_MS
    envs = make_env(name, 1)
    if isinstance(envs, GymnasiumEnvironment):
        modes = envs.envs.metadata.get("render_modes") or []
        envs.close()
        if "rgb_array" not in modes:
            raise ConfigError(
                f"the environment {name!r} cannot be drawn", expected="the render mode rgb_array"
            )
        rendered = GymnasiumEnvironment(name, 1, render_mode="rgb_array")
        rate = rendered.envs.metadata.get("render_fps") or 25

        def picture(_: Tensor, caption: str) -> Image.Image:
            image = Image.fromarray(rendered.render())
            image.thumbnail((WIDTH, WIDTH))
            return image.quantize(64)

        return rendered, picture, round(1000 / rate)
    tables = envs.tables()
    if tables is None or not tables.rows:
        raise ConfigError(f"{name} draws no pictures", expected=f"one of: {', '.join(TENSOR_ENVIRONMENTS)}")
    rows = tables.rows
    return (
        envs,
        lambda o, caption: canvas(lambda pen, cells: _grid(pen, cells, rows), o, caption),
        GRID_FRAME_MS,
    )


def _cart_pole(pen: Any, state: list[float]) -> None:
    x, _, angle, _ = state
    at, floor = WIDTH / 2 + x * WIDTH / 4.8, 150
    pen.line((0, floor, WIDTH, floor), fill=SOFT, width=2)
    pen.rectangle((at - 20, floor - 24, at + 20, floor), fill=INK)
    tip = (at + 90 * math.sin(angle), floor - 24 - 90 * math.cos(angle))
    pen.line((at, floor - 24, *tip), fill=ACCENT, width=8)


def _acrobot(pen: Any, state: list[float]) -> None:
    one, both = (
        math.atan2(state[1], state[0]),
        math.atan2(state[1], state[0]) + math.atan2(state[3], state[2]),
    )
    x, y, length = WIDTH / 2, 92.0, 42
    pen.line((0, y - length, WIDTH, y - length), fill=SOFT, width=2)
    for angle in (one, both):
        end = (x + length * math.sin(angle), y + length * math.cos(angle))
        pen.line((x, y, *end), fill=ACCENT, width=8)
        pen.ellipse((x - 5, y - 5, x + 5, y + 5), fill=INK)
        x, y = end


def _pendulum(pen: Any, state: list[float]) -> None:
    cos, sin, _ = state
    x, y = WIDTH / 2, 96
    pen.line((x, y, x - 78 * sin, y - 78 * cos), fill=ACCENT, width=10)
    pen.ellipse((x - 6, y - 6, x + 6, y + 6), fill=INK)


def _mountain_car(pen: Any, state: list[float]) -> None:
    def at(x: float) -> tuple[float, float]:
        return (x + 1.2) / 1.8 * WIDTH, 165 - 75 * (math.sin(3 * x) + 1)

    pen.line([at(-1.2 + 1.8 * i / 60) for i in range(61)], fill=SOFT, width=3)
    goal, (x, y) = at(0.5), at(state[0])
    pen.line((*goal, goal[0], goal[1] - 26), fill=INK, width=2)
    pen.ellipse((x - 8, y - 16, x + 8, y), fill=ACCENT)


def _grid(pen: Any, cells: list[float], rows: tuple[str, ...]) -> None:
    size = min((HEIGHT - 20) / len(rows), (WIDTH - 8) / len(rows[0]))
    left, agent = (WIDTH - size * len(rows[0])) / 2, int(np.argmax(cells))
    for i, letter in enumerate("".join(rows)):
        x, y = left + size * (i % len(rows[0])), 3 + size * (i // len(rows[0]))
        pen.rectangle((x, y, x + size, y + size), fill=CELLS[letter], outline=SOFT)
        if i == agent:
            pen.ellipse((x + size / 4, y + size / 4, x + 3 * size / 4, y + 3 * size / 4), fill=ACCENT)


PAINTERS: dict[str, Callable[[Any, list[float]], None]] = {
    "CartPole-v1": _cart_pole,
    "Acrobot-v1": _acrobot,
    "Pendulum-v1": _pendulum,
    "MountainCar-v0": _mountain_car,
}
