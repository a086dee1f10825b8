"""The type of rollouts: chosen among those whose log-probabilities agree, left when they no longer do, named by metrics."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.align.byte_model import decoder, scribe
from tests.support.align.kill_at_step import check_resume
from tests.support.align.rl_policies import SMALL, network, train, worker_of
from tests.support.compiler import needs_compiler
from tests.support.configs import nested, updated

from whorl.align.model import sampling_dtype
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling_dtype import RolloutSampler
from whorl.align.rl import train as rl_train
from whorl.align.rl.config import RLConfig, RolloutConfig
from whorl.align.rl.rollout import RolloutWorker
from whorl.errors import ConfigError

LOOSE = 0.1  # nats: int8 weights of the tiny model are within


def config(**changes: Any) -> RLConfig:
    return updated(SMALL, **nested(**changes))


class _Row:
    def __init__(self, ids: list[int], new: int) -> None:
        self.ids, self.action_mask = ids, [False] * (len(ids) - new) + [True] * new
        self.log_probs, self.versions = [0.0] * len(ids), [0] * len(ids)


@needs_compiler
@pytest.mark.parametrize(("bound", "chosen"), [(LOOSE, "int8"), (1e-9, "float32")])
def test_bound_decides_which_types_are_timed(
    bound: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing is replaced: the last admissible candidate is the fastest. The differences are real."""
    offered: list[str] = []
    monkeypatch.setattr(
        sampling_dtype, "fastest", lambda name, ways: (offered.extend(ways), list(ways)[-1])[1]
    )
    sampler = RolloutSampler(
        decoder(), scribe(), sequences=4, max_length=24, temperature=1.0, requested="auto", bound=bound, options={}
    )  # fmt: skip
    assert sampler.adapt([[_Row([65 + n, 66, 67, 68], 2)] for n in range(4)], seed=0) == 0.0
    assert sampler.dtype == chosen and offered[0] == "float32"
    assert offered == ["float32", *(["bfloat16", "int8"] if bound == LOOSE else [])]
    engine = sampler.engine
    prompts = [[65, 66], [70]]
    differences = sampler._probe(engine, prompts, seed=1)
    assert 0 < differences < (LOOSE if chosen == "int8" else 1e-5)


@needs_compiler
def test_drift_falls_back_and_is_logged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake reports agreement for the two candidates and one batch, then a drift."""
    reported = iter([0.01, 0.01, 0.02, 0.5])
    monkeypatch.setattr(sampling_dtype, "sampler_difference", lambda *given: next(reported))
    monkeypatch.setattr(sampling_dtype, "fastest", lambda name, ways: "bfloat16")
    monkeypatch.setattr(rl_train, "MIN_TIMED_FLOPS", 0.0)
    lines: list[str] = []
    given = config(steps=5, rollout={"max_logprob_diff": LOOSE})
    _, history, _ = train(folder, given, log=lines.append)
    used = [name for m in history for name in m if name.startswith("rollout_dtype/")]
    assert used == [f"rollout_dtype/{d}" for d in ("float32", "bfloat16", "bfloat16", "float32", "float32")]
    changes = [line for line in lines if "rollouts are sampled" in line]
    assert len(changes) == 2 and changes[0].endswith("with bfloat16 weights")
    assert "float32 weights from now on" in changes[1] and "0.5 nats" in changes[1]
    differences = [m["logprob_diff_mean"] for m in history]  # the learner's own, real measurement
    assert all(a < 1e-5 for a in (differences[0], *differences[3:])) and all(
        a > 1e-5 for a in differences[1:3]
    )


@needs_compiler
def test_forced_type_is_used_and_resumes(folder: Path, tmp_path: Path) -> None:
    given = config(rollout={"dtype": "int8"})
    _, history, _ = train(folder, given)
    assert all(m["rollout_dtype/int8"] == 1 and m["logprob_diff_mean"] > 1e-5 for m in history)
    check_resume(partial(train, folder, given), tmp_path, kill=3)


def test_impossible_type_is_refused_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")
    with pytest.raises(
        ConfigError, match=r"rollout\.dtype is int8, which is impossible here.*cpu=torch is forced"
    ):
        train(folder, config(rollout={"dtype": "int8"}))


@pytest.mark.parametrize(("bound", "scored"), [(None, 1), (0.0, 3)])
def test_agreeing_log_probs_are_not_computed_again(
    bound: float | None, scored: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three rollout batches with two updates each, the first is scored: nothing was compared before it."""
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")
    calls: list[int] = []
    score = PolicyModel.score
    monkeypatch.setattr(PolicyModel, "score", lambda self, batch: (calls.append(1), score(self, batch))[1])
    given = config(steps=3, update={"minibatches": 2}, rollout={"max_logprob_diff": bound})
    _, history, _ = train(folder, given)
    assert len(calls) == scored
    assert all(m["logprob_diff_max"] < 1e-4 for m in history)


def test_default_bound_follows_learner_dtype() -> None:
    found = {d: RolloutConfig().bound(str(d).removeprefix("torch.")) for d in (torch.float32, torch.bfloat16)}
    assert found == {torch.float32: 1e-4, torch.bfloat16: 0.02}
    assert RolloutConfig(max_logprob_diff=0.3).bound("float32") == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"async_rollout": {"workers": 1}}, "sample ahead"),
        ({"async_rollout": {"workers": 2, "max_policy_lag": 0}}, "sample ahead"),
        ({"run": {"max_train_seconds": 9}}, "run.max_train_seconds is 9"),
        ({"environment": {"name": "calculator", "overlap": True}}, "environment.overlap"),
        ({"async_rollout": {"workers": 1, "max_policy_lag": 0}}, ""),
    ],
)
def test_deterministic_stage_refuses_what_time_decides(changes: dict[str, Any], message: str) -> None:
    if not message:
        assert RLConfig.model_validate({**changes, "train": {"deterministic": True}})
        return
    with pytest.raises(ValueError, match=message):
        RLConfig.model_validate({**changes, "train": {"deterministic": True}})
    assert RLConfig.model_validate(changes)


def test_worker_samples_deterministically(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own nothing else enters the mode."""
    monkeypatch.setattr(RolloutWorker, "_fill", lambda *_: torch.are_deterministic_algorithms_enabled())
    for enabled in (False, True):
        wanted, net = updated(SMALL, train={"deterministic": enabled}), network()
        worker: Any = rl_train.PolicyTask(net, worker_of(net, folder, wanted), wanted).worker
        assert worker.fill(None, None, None) is enabled
