"""Tasksets and harnesses of verifiers: requests answered by the engine, exact ids, errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.support.align.byte_model import decoder
from tests.support.align.rl_policies import SMALL, train
from tests.support.align.text_envs import ShortReplies

from whorl.align.environments import EnvironmentConfig
from whorl.align.rl.environments import verifiers as adapter
from whorl.align.rl.environments.verifiers import verifiers_tasks
from whorl.errors import ConfigError, DataError
from whorl.evals.episodes.config import make_environment
from whorl.evals.episodes.env_loop import make_env_loop
from whorl.evals.episodes.runner import Episode, EpisodeRunner
from whorl.evals.episodes.samplers import EngineSampler
from whorl.evals.model.sampling import open_engine, policy_sampling
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.tokenizer import Tokenizer

CHAT = Tokenizer([bytes([i]) for i in range(256)], special_tokens=["<|im_start|>", "<|im_end|>"])
TASKSET = "verifiers_sums"


def test_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ConfigError, match=r"whorl\[verifiers\]"):
        verifiers_tasks("elsewhere", n_train=1, n_test=1)


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "support" / "align")
    yield
    sys.modules.pop(TASKSET, None)


def episodes(n: int = 3, **options: Any) -> tuple[list[Episode], TokenEncoder]:
    """Run one task n times with random weights, whose replies end at every second byte."""
    config = EnvironmentConfig(name="verifiers", options={"taskset": TASKSET, **options}, step_seconds=20)
    writer = TokenEncoder(CHAT)
    engine = open_engine(decoder(), (8, 400), writer, with_text=False)
    writer.stop_ids |= frozenset(range(0, 256, 2))
    task = verifiers_tasks(TASKSET, n_train=2, n_test=1)["train"][0]
    with closing(make_env_loop(config, [])) as loop:
        runner = EpisodeRunner(EngineSampler(engine, writer, 12), loop, config)
        return runner.run([task] * n, policy_sampling(1.0), seed=5), writer


@pytest.mark.usefixtures("sums")
def test_requests_are_answered_with_exact_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers to a harness hold the row's ids and log-probabilities, and the row is never tokenized again."""
    sent: list[dict[str, Any]] = []
    make = adapter.completion
    monkeypatch.setattr(adapter, "completion", lambda *row: sent.append(make(*row)) or sent[-1])
    found, writer = episodes(harness_options={"turns": 3})
    whole = [e for e in found if e.turns == 3]
    assert len({e.prompt[0]["content"] for e in found}) == 1 and whole
    assert not any(e.env_errors for e in found) and all(e.reason == "agent_completed" for e in whole)
    for episode in whole:
        ids = writer.prompt(episode.prompt)
        for _ in range(3):
            (answer,) = [a for a in sent if a["prompt_token_ids"] == ids and _continues(episode, a)]
            reply = answer["choices"][0]["token_ids"]
            log_probs = [p["logprob"] for p in answer["choices"][0]["logprobs"]["content"]]
            assert log_probs == episode.log_probs[len(ids) : len(ids) + len(reply)]
            assert all(episode.action_mask[len(ids) : len(ids) + len(reply)])
            ids += reply
            if len(ids) < len(episode.ids):
                more = writer.after_reply(
                    episode.prompt, [{"role": "user", "content": "Again."}], stop_id=ids[-1]
                )
                assert not any(episode.action_mask[len(ids) : len(ids) + len(more)])
                ids += more
        assert ids == episode.ids


def _continues(episode: Episode, answer: dict[str, Any]) -> bool:
    ids = answer["prompt_token_ids"] + answer["choices"][0]["token_ids"]
    return episode.ids[: len(ids)] == ids


@pytest.mark.usefixtures("sums")
@pytest.mark.parametrize(
    ("options", "reason", "errors"),
    [
        ({"harness_options": {"way": "raises"}}, "without a request: HarnessError: harness 'verifiers_sums': KeyError", 1),
        ({"harness_options": {"way": "streams"}}, "streaming is not supported", 1),
        ({"harness_options": {"way": "rewrites"}}, "the harness changed earlier messages", 1),
        ({"max_turns": 1}, "max_turns", 0),
    ],
)  # fmt: skip
def test_errors_of_harness_are_counted(options: Any, reason: str, errors: int) -> None:
    found, _ = episodes(1, **options)
    assert found[0].env_errors == errors and found[0].failed == bool(errors)
    assert reason in found[0].reason and (errors or not found[0].finished)


@pytest.mark.usefixtures("sums", "one_runner")
def test_log_probs_agree_across_turns(folder: Path) -> None:
    """Engine and trainer agree on the replies, and no message of the harness is in the loss."""
    options = {"taskset": TASKSET, "taskset_options": {"n": 20}, "harness_options": {"turns": 3}}
    environment = EnvironmentConfig(name="verifiers", options=options)
    sizes = {"environment": environment, "steps": 2, "max_seq_len": 200, "max_completion_tokens": 8}
    _, history, seen = train(folder, SMALL.model_copy(update=sizes), worker_class=ShortReplies)
    assert max(m["logprob_diff_max"] for m in history) < 1e-4
    assert max(m["turns/mean"] for m in history) > 1.2 and not any(m["env_errors"] for m in history)
    for experience in seen:
        mask, targets = experience.batch["loss_mask"], experience.batch["targets"]
        texts = [bytes(i for i in t[m].tolist() if i < 256) for t, m in zip(targets, mask, strict=True)]
        assert not any(b"Again" in text for text in texts) and (mask.sum(1) == experience.length).all()


@pytest.mark.usefixtures("sums")
def test_tasks_are_distinct_and_split() -> None:
    made = verifiers_tasks(TASKSET, {"n": 20}, n_train=9, n_test=2)
    texts = [[task.messages[0]["content"] for task in made[split]] for split in ("test", "train")]
    assert texts == [["0+0=", "1+1="], ["2+2=", "3+3=", "4+4=", "5+5="]]
    with pytest.raises(DataError, match="has 6 distinct tasks, and 6 are held out"):
        verifiers_tasks(TASKSET, {"n": 20}, n_train=9, n_test=6)


@pytest.mark.usefixtures("sums")
def test_unknown_names_stop_the_stage() -> None:
    with closing(make_env_loop(None, [])) as loop:
        for options, message in (
            ({"taskset": "no_such_taskset"}, "taskset 'no_such_taskset' cannot be loaded"),
            (
                {"taskset": TASKSET, "harness": "no_such_harness"},
                "harness 'no_such_harness' cannot be loaded",
            ),
            ({"taskset": TASKSET, "harness_options": {"depth": 1}}, r"(?s)cannot be loaded: .*depth"),
            ({"taskset": TASKSET, "taskset_options": {"depth": 1}}, r"(?s)cannot be loaded: .*depth"),
        ):
            with pytest.raises(ConfigError, match=message):
                make_environment(EnvironmentConfig(name="verifiers", options=options), loop)
