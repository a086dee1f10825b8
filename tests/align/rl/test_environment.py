"""Environments of several turns: ids, masks and log-probabilities of rollouts, limits, errors, resume."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.support.align.byte_model import decoder
from tests.support.align.rl_policies import SMALL, tasks, train
from tests.support.align.text_envs import ShortReplies, config_of
from tests.support.configs import updated

from whorl.align.environments import ENVIRONMENTS, EnvironmentConfig
from whorl.align.rl.advantages import resolve_method
from whorl.align.rl.config import AsyncRolloutConfig, RLConfig
from whorl.align.rl.evaluation import filter_by_length
from whorl.errors import ConfigError
from whorl.evals.episodes.config import make_environment
from whorl.evals.episodes.env_loop import make_env_loop
from whorl.evals.episodes.environment import Reply, Turn
from whorl.evals.episodes.runner import EpisodeRunner
from whorl.evals.episodes.samplers import EngineSampler
from whorl.evals.grading import VerifiableTask
from whorl.evals.model.sampling import open_engine, policy_sampling
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_runner")
LONG = {"max_seq_len": 64, "max_completion_tokens": 8}
CHAT = TokenEncoder(
    Tokenizer([bytes([i]) for i in range(256)], special_tokens=["<|im_start|>", "<|im_end|>"])
)


def changed(environment: EnvironmentConfig, **changes: Any) -> RLConfig:
    return updated(SMALL, **{**LONG, "environment": environment, **changes})


@contextmanager
def runner_of(config: EnvironmentConfig | None, length: int = 200) -> Iterator[EpisodeRunner]:
    """Yield a runner of random weights, whose replies end at every second byte."""
    model = decoder()
    engine = open_engine(model, (8, length), CHAT, with_text=False)
    writer = TokenEncoder(CHAT.tokenizer)
    writer.stop_ids |= frozenset(range(0, 256, 2))
    with closing(make_env_loop(config, [])) as loop:
        yield EpisodeRunner(EngineSampler(engine, writer, 3), loop, config)


def test_stopped_loop_prints_nothing_about_its_steps(caplog: pytest.LogCaptureFixture) -> None:
    loop = make_env_loop(None, [])
    env = make_environment(None, loop)
    (task,) = tasks(1)
    loop.reset_all([env], [task], 5.0)
    loop.submit(0, env, [], Reply("4"), 5.0)
    while not loop._requests:  # the step awaits its verdict
        time.sleep(0.01)
    thread = next(t for t in threading.enumerate() if t.name == "environments")
    loop.close()
    thread.join(5.0)
    loop._requests.clear()
    gc.collect()
    assert not thread.is_alive() and "destroyed" not in caplog.text


@pytest.mark.parametrize(("finish", "reward"), [("stop", 1.0), ("length", 0.0)])
def test_verifier_grades_a_cut_reply_as_cut(finish: Any, reward: float) -> None:
    task = VerifiableTask("t", "2+3=", verifier="numeric", answer="5")
    with closing(make_env_loop(None, [task])) as loop:
        env = make_environment(None, loop)
        loop.reset_all([env], [task], 5.0)
        loop.submit(0, env, [], Reply("so it is 5", finish=finish), None)
        while not loop.awaits_flush:
            time.sleep(0.001)
        loop.flush()
        found = loop.take(5.0)
    assert found is not None and isinstance(found[1], Turn) and found[1].reward == reward


@pytest.mark.parametrize("chat", [False, True])
def test_rows_keep_sampled_ids_and_mask_messages(chat: bool) -> None:
    """A row is prompt, replies and messages in order; replies are the sampled ids, and the rest is tokenized once."""
    with runner_of(config_of("Echo", chat=chat)) as runner:
        episodes = runner.run(tasks(6), policy_sampling(1.0), seed=3)
        again = runner.run(tasks(6), policy_sampling(1.0), seed=3)
    writer = runner.sampler.encoder
    assert [e.ids for e in episodes] == [e.ids for e in again]
    assert 1 <= min(e.turns for e in episodes) < 3 == max(e.turns for e in episodes)  # a reply without an end
    for episode in episodes:
        ids = writer.prompt(episode.prompt)
        mask = [False] * len(ids)
        replies = [m["content"] for m in episode.messages if m["role"] == "assistant"] + [episode.reply.text]
        assert len(replies) == episode.turns and episode.finished == (
            episode.turns == 3 and episode.reply.finished
        )
        for turn in range(episode.turns):
            start = len(ids)
            stop = start + next(
                (n for n, sampled in enumerate(episode.action_mask[start:]) if not sampled), 99
            )
            reply = episode.ids[start:stop]
            if not chat and turn < episode.turns - 1:
                assert writer.decode(reply) == replies[turn]
            ids, mask = ids + reply, mask + [True] * len(reply)
            if turn < episode.turns - 1:
                message = {"role": "tool", "content": f"[{len(replies[turn])}]"}
                text = (
                    f"<|im_end|>\n<|im_start|>tool\n[{len(replies[turn])}]<|im_end|>\n<|im_start|>assistant\n"
                )
                tail = writer.after_reply(episode.prompt, [message], stop_id=reply[-1])
                assert CHAT.tokenizer.decode(tail).decode() == (text if chat else message["content"])
                ids, mask = ids + tail, mask + [False] * len(tail)
        assert ids == episode.ids and mask == episode.action_mask
        assert all((p != 0) == sampled for p, sampled in zip(episode.log_probs, mask, strict=True))


def test_stop_id_is_not_repeated_after_reply() -> None:
    prompt, end = [{"role": "user", "content": "hi"}], CHAT.tokenizer.special_token_ids["<|im_end|>"]
    reply = {"role": "assistant", "content": "yes"}
    more = [{"role": "tool", "content": "<|im_end|>4"}]
    tail = CHAT.after_reply(prompt, more, stop_id=end)
    whole = CHAT.prompt([*prompt, reply, *more])
    assert [*CHAT.prompt(prompt), *b"yes", end, *tail] == whole
    assert CHAT.after_reply(prompt, more, stop_id=CHAT.tokenizer.end_ids[0]) == [end, *tail]


@pytest.mark.parametrize(
    ("name", "options", "length", "wanted"),
    [
        ("Echo", {"max_turns": 2}, 200, {"turns": 2, "finished": False, "env_errors": 0}),
        ("Faulty", {"way": "long"}, 40, {"turns": 1, "finished": False, "env_errors": 0, "reward": 0.5}),
        ("Faulty", {"way": "ends"}, 200, {"turns": 1, "finished": False, "env_errors": 0, "reward": 1.0}),
        ("Faulty", {"way": "raises"}, 200, {"reason": "step: KeyError: 'state'"}),
        ("Faulty", {"way": "wrong type"}, 200, {"reason": "step: DataError: step returned str"}),
        ("Faulty", {"way": "not finite"}, 200, {"reason": "step: DataError: the reward of a turn is nan"}),
        ("Faulty", {"way": "bad message"}, 200, {"reason": "step: DataError: a message of a turn is {"}),
        ("Faulty", {"way": "bad count"}, 200, {"reason": "step: DataError: tool_calls of a turn is 'two'"}),
        ("Faulty", {"way": "hangs", "step_seconds": 0.1}, 200, {"reason": "step took longer than 0.1 s"}),
        ("Faulty", {"way": "blocks", "step_seconds": 0.1}, 200, {"reason": "step ignores its limit: "}),
        ("Sync", {}, 200, {"reason": "step: TypeError: object Turn can't be used in 'await' expression"}),
        ("Faulty", {"way": "reset"}, 200, {"reason": "reset: RuntimeError: no such level", "turns": 0}),
        ("Faulty", {"way": "reset exits"}, 200, {"reason": "reset: SystemExit: bye", "turns": 0}),
        ("Faulty", {"way": "reset type"}, 200, {"reason": "reset: DataError: reset returned int"}),
        ("Faulty", {"way": "reset empty"}, 200, {"reason": "reset: DataError: reset returned an empty prompt"}),
        ("Faulty", {"way": "reset message"}, 200, {"reason": "reset: DataError: a message of the prompt is"}),
        (
            "Faulty",
            {"way": "reset hangs", "reset_seconds": 0.1},
            200,
            {"reason": "reset took longer than 0.1 s", "turns": 0},
        ),
        ("Faulty", {"way": "reset blocks", "reset_seconds": 0.1}, 200, {"reason": "reset ignores its limit: ", "turns": 0}),
    ],
)  # fmt: skip
def test_limits_truncate_and_errors_are_counted(
    name: str, options: dict[str, Any], length: int, wanted: dict[str, Any]
) -> None:
    with runner_of(config_of(name, **options), length) as runner:
        runner.sampler.encoder.stop_ids = frozenset(range(300))  # every reply has one id
        episodes = runner.run(tasks(3), policy_sampling(1.0), seed=1)
    for episode in episodes:
        reason = wanted.get("reason", "")
        assert episode.reason.startswith(reason) and episode.env_errors == bool(reason)
        assert episode.failed == bool(reason) and (not reason or episode.reward == 0)
        assert {n: getattr(episode, n) for n in wanted if n != "reason"} == {
            n: v for n, v in wanted.items() if n != "reason"
        }


def test_error_of_close_is_counted_and_reward_stays() -> None:
    with runner_of(config_of("Faulty", way="close", max_turns=1)) as runner:
        (episode,) = runner.run(tasks(1), policy_sampling(1.0), seed=1)
    assert episode.env_errors == 1 and episode.reason == "close: OSError: no server"
    assert episode.reward == 0.5 and not episode.failed


def test_reset_may_wait_and_run_programs() -> None:
    """Coroutines of all rollouts wait at the same time; programs run in the sandbox."""
    config = config_of("Prepared", seconds=0.3)
    with runner_of(config) as runner:
        began = time.monotonic()
        episodes = runner.run(tasks(6), policy_sampling(1.0), seed=1)
        assert time.monotonic() - began < 6 * 0.3
    assert [e.prompt for e in episodes] == ["49\n"] * 6 and not any(e.env_errors for e in episodes)
    assert len(filter_by_length(CHAT, tasks(3), 24, 5, config)[0]) == 3


def test_filter_stops_when_no_reset_succeeds() -> None:
    for way, message in (("reset", "no such level"), ("reset hangs", "took longer than 0.1 s")):
        config = config_of("Faulty", way=way, reset_seconds=0.1)
        with pytest.raises(ConfigError, match=f"starts none of 3 tasks: .*{message}"):
            filter_by_length(CHAT, tasks(3), 64, 5, config)


def test_waiting_environment_does_not_stop_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine samples while one environment waits: its row is the last, and the others have ended before."""
    with runner_of(config_of("Echo", turns=2, overlap=True)) as runner:
        order: list[int] = []
        process = runner._process
        make, made = runner._make, []

        def slow_first(services: Any) -> Any:
            made.append(make(services))
            made[-1].seconds = 0.5 if len(made) == 1 else 0.0
            return made[-1]

        def record(key: int, turn: Any) -> None:
            order.append(runner.stepping[key])
            process(key, turn)

        monkeypatch.setattr(runner, "_make", slow_first)
        monkeypatch.setattr(runner, "_process", record)
        runner.sampler.encoder.stop_ids = frozenset(range(300))
        runner.run(tasks(4), policy_sampling(1.0), seed=1)
    assert order[-2:] == [0, 0] and sorted(order) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("chat", [False, True])
def test_log_probs_agree_across_turns(chat: bool, folder: Path, tmp_path: Path) -> None:
    config = changed(config_of("Echo", chat=chat), max_seq_len=128 if chat else 64)
    _, history, seen = train(folder, config, worker_class=ShortReplies)
    assert max(m["logprob_diff_max"] for m in history) < 1e-4
    assert max(m["turns/mean"] for m in history) > 1.5
    assert all(m["tool_calls"] == m["turns/mean"] * 12 and m["env_errors"] == 0 for m in history)
    for experience in seen:  # messages are no targets
        mask, targets = experience.batch["loss_mask"], experience.batch["targets"]
        texts = [bytes(i for i in t[m].tolist() if i < 256) for t, m in zip(targets, mask, strict=True)]
        assert not any(b"tool\n" in text for text in texts)
        assert (experience.turns > 1).any() and (mask.sum(1) == experience.length).all()


def test_worker_process_runs_environment(folder: Path) -> None:
    config = changed(config_of("Echo"), async_rollout=AsyncRolloutConfig(workers=1))
    _, history, _ = train(folder, config, worker_class=ShortReplies)
    assert history[-1]["turns/mean"] > 1


def test_environment_config_rejects_what_cannot_run() -> None:
    assert RLConfig(environment="calculator").environment == EnvironmentConfig(name="calculator")
    with pytest.raises(ValidationError, match="calculator"):
        RLConfig(environment="calculater")
    with pytest.raises(ValidationError, match="overlong_buffer"):
        RLConfig(environment="calculator", sampling={"overlong_buffer": 4})
    for name, options, message in (
        ("no.such:Env", {}, "cannot be imported"),
        ("tests.support.align.text_envs:Echo", {"depth": 1}, "unexpected keyword argument 'depth'"),
        ("tests.support.align.text_envs:config_of", {}, "is EnvironmentConfig|cannot be made"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_environment(EnvironmentConfig(name=name, options=options), make_env_loop(None, []))
    config = RLConfig(environment=config_of("Echo"), loss={"aggregation": "constant"})
    assert resolve_method(config).constant == 4 * config.max_completion_tokens


def test_environment_is_registered_from_outside(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A short name in the table trains like an address; a name is registered once."""
    monkeypatch.setattr(ENVIRONMENTS, "entries", dict(ENVIRONMENTS.entries))
    ENVIRONMENTS.register("echo", "tests.support.align.text_envs:Echo")
    config = RLConfig(**{**SMALL.model_dump(), **LONG, "environment": "echo", "steps": 1})
    _, history, _ = train(folder, config, worker_class=ShortReplies)
    assert history[0]["turns/mean"] > 1
    with pytest.raises(ConfigError, match="'echo' is registered twice"):
        ENVIRONMENTS.register("echo", "elsewhere:Echo")


def test_filter_by_length_uses_environment_prompt() -> None:
    plain, chat = (
        filter_by_length(CHAT, tasks(3), 24, 5, config_of("Echo", chat=c))[0] for c in (False, True)
    )
    assert len(plain) == 3 and not chat
