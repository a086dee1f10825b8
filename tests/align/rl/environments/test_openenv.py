"""Environments of OpenEnv: a server on this machine, its own client, errors."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from tests.support.align.byte_model import decoder

from whorl.align.environments import EnvironmentConfig
from whorl.align.rl.evaluation import filter_by_length
from whorl.errors import ConfigError
from whorl.evals.episodes.config import make_environment
from whorl.evals.episodes.env_loop import StepError, make_env_loop
from whorl.evals.episodes.environment import Reply
from whorl.evals.episodes.runner import EpisodeRunner
from whorl.evals.episodes.samplers import EngineSampler
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.sampling import open_engine, policy_sampling
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import Tokenizer

CHAT = Tokenizer([bytes([i]) for i in range(256)], special_tokens=["<|im_start|>", "<|im_end|>"])
PLAY = {"action": "guess", "observation": "text"}


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    config = EnvironmentConfig(name="openenv", options={"url": "http://127.0.0.1:1"})
    with pytest.raises(ConfigError, match=r"whorl\[openenv\]"):
        make_env_loop(config, [])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from tests.support.align.openenv_guess import GuessAction, GuessNumber, GuessObservation

    app = create_fastapi_app(GuessNumber, GuessAction, GuessObservation, max_concurrent_envs=16)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def task(**arguments: Any) -> VerifiableTask:
    return VerifiableTask(
        "game", messages=({"role": "user", "content": "Play."},), answer=json.dumps(arguments)
    )


def play(url: str, replies: list[str], row: VerifiableTask, **options: Any) -> list[Any]:
    """Return the prompt, and the turns that answer the replies."""
    config = EnvironmentConfig(name="openenv", options={"url": url, **options}, reset_seconds=1.5)
    with closing(make_env_loop(config, [])) as loop:
        env = make_environment(config, loop)
        found: list[Any] = loop.reset_all([env], [row], config.reset_seconds)
        for key, text in enumerate(replies):
            loop.submit(key, env, (), Reply(text), 10.0)
            while (answer := loop.take(0.05)) is None:
                pass
            found.append(answer[1])
        assert loop.close_all([env], 5.0) == [None]
    return found


def test_replies_are_actions_until_server_ends(url: str) -> None:
    prompt, first, second, third = play(url, ["9", "x", "7"], task(seed=7), **PLAY)
    assert [*prompt] == [{"role": "user", "content": "Play.\n\nGuess a digit: "}]
    assert [*first.messages] == [{"role": "user", "content": "too high: "}] and first.reward == 0
    assert second.reward == -0.5 and not second.done
    assert (
        third.done and third.reward == 1.0 and third.info == {"passed": False, "tool_calls": 1}
    )  # 0.5 in all


def test_actions_and_observations_as_json(url: str) -> None:
    prompt, first, second = play(url, ['{"guess": 7', '{"guess": "7"}'], task(seed=7))
    assert json.loads(prompt[0]["content"].removeprefix("Play.\n\n"))["text"] == "Guess a digit: "
    assert first.info["malformed_calls"] == 1 and "a JSON object" in first.messages[0]["content"]
    assert second.done and second.info["passed"]


@pytest.mark.parametrize(
    ("replies", "arguments", "options", "reason"),
    [
        ([], {"hang": True}, PLAY, "reset took longer than 1.5 s"),
        (["crash"], {}, PLAY, "the game crashed"),
        ([], {}, {"observation": "board"}, "expected a text in its field 'board'|the observation is"),
        (['{"move": 1}'], {}, {}, "step: RuntimeError"),
    ],
)
def test_errors_of_server_are_counted(
    url: str, replies: list[str], arguments: Any, options: Any, reason: str
) -> None:
    *_, last = play(url, replies, task(**arguments), **options)
    assert isinstance(last, StepError)
    assert any(part in last.reason for part in reason.split("|"))


def test_unreachable_server_stops_the_stage() -> None:
    pytest.importorskip("openenv.core", reason="needs the extra openenv")
    config = EnvironmentConfig(name="openenv", options={"url": "http://127.0.0.1:9", **PLAY})
    with pytest.raises(ConfigError, match="starts none of 2 tasks: reset: ConnectionError"):
        filter_by_length(TokenEncoder(CHAT), [task(), task()], 200, 8, config)


def test_rollouts_play_in_separate_sessions(url: str) -> None:
    """Eight rollouts at a time, of three batches, on a server of sixteen sessions: they are closed."""
    config = EnvironmentConfig(name="openenv", options={"url": url, **PLAY}, max_turns=3)
    writer = TokenEncoder(CHAT)
    engine = open_engine(decoder(), (8, 300), writer, with_text=False)
    writer.stop_ids |= frozenset(range(0, 256, 2))
    with closing(make_env_loop(config, [])) as loop:
        runner = EpisodeRunner(EngineSampler(engine, writer, 4), loop, config)
        for seed in range(3):
            rows = runner.run([task(seed=n % 10) for n in range(8)], policy_sampling(1.0), seed=seed)
            assert not any(e.env_errors for e in rows), [e.reason for e in rows]
            assert max(e.turns for e in rows) == 3
            for row in rows:
                assert sum(row.action_mask) < len(row.ids) and isinstance(row.reward, float)
