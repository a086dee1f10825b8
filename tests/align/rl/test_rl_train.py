"""Policy optimization end to end: learning, bitwise resume, worker processes, replicas, metrics."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pydantic import ValidationError
from tests.support.align.byte_model import network, scribe
from tests.support.align.kill_at_step import (
    History,
    check_replicas,
    check_resume,
    same_weights,
)
from tests.support.align.rl_policies import SMALL, tasks, train, worker_of
from tests.support.children import children
from tests.support.configs import nested, updated

from whorl.align.config import LoRAConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.policy_config import KLConfig, PolicyLossOverrides
from whorl.align.rl.advantages import resolve_method
from whorl.align.rl.config import AsyncRolloutConfig, RLConfig
from whorl.align.rl.evaluation import filter_by_length
from whorl.align.rl.experience import Experience
from whorl.align.rl.replicas import ReplicaGroup, choose_rl_replicas
from whorl.align.rl.rollout import RolloutWorker
from whorl.align.rl.train import PolicyTask, train_policy
from whorl.errors import ConfigError, ProducerError
from whorl.evals.grading.task import VerifiableTask
from whorl.machine.device_probe import probe
from whorl.objectives.llm_policy import PRESETS, CompletionTokens, policy_loss
from whorl.objectives.next_token import Loss
from whorl.parallel.process_group import ProcessGroup, ReplicaError
from whorl.registry import permit_code
from whorl.train.learner.learner import UpdateState
from whorl.train.resilience.preemption import PreemptedError

pytestmark = pytest.mark.usefixtures("one_runner")
LORA = LoRAConfig(rank=2)


def changed(**changes: Any) -> RLConfig:
    return updated(SMALL, **nested(**changes))


def workers(**changes: Any) -> AsyncRolloutConfig:
    return AsyncRolloutConfig(workers=1, **changes)


LEARN = {"prompts_per_step": 6, "group_size": 8, "max_completion_tokens": 2, "lr_scale": 1.0, "steps": 6}
LEARNING = changed(**LEARN, sampling={"curriculum": "variance"})
LOCKSTEP: dict[str, Any] = {"max_policy_lag": 0, "importance": "none"}


@pytest.mark.parametrize("algorithm", ["reinforce", "ppo", "grpo", "gspo", "expert_iteration"])
def test_algorithms_learn_reward(algorithm: str, folder: Path) -> None:
    """The reward is for a completion that starts with a digit, which is rare at first.

    `test_overrides_turn_algorithm_into_another` and the objectives' tests compare the other algorithms with these.
    """
    schedule = SMALL.train.schedule.model_copy(update={"kind": "constant", "decay_ratio": 0.5})
    config = changed(
        **{**LEARN, "steps": 40, "prompts_per_step": 8}, algorithm=algorithm, train={"schedule": schedule}
    )
    before = dict(network().named_parameters())
    net, history, _ = train(folder, config)
    assert np.mean([t["accuracy"] for t in history[:5]]) < 0.3
    assert np.mean([t["accuracy"] for t in history[-5:]]) > 0.7
    assert max(t.get("logprob_diff_max", 0.0) for t in history) < 1e-4  # absent where no completion passed
    learnt = dict(net.named_parameters())
    assert not any(torch.equal(learnt[n], p) for n, p in before.items() if "memory" not in n)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"algorithm": "ppo", "update": {"epochs": 2, "minibatches": 2}},
    {"algorithm": "dapo", "sampling": {"dynamic_sampling_rounds": 2, "curriculum": "variance"}},
    {"algorithm": "rloo", "kl": KLConfig(coef=0.1, target_kl=0.01), "lora": LORA},
    {"algorithm": "reinforce", "loss": PolicyLossOverrides(baseline="running", scale_rewards="unbiased")},
]


@pytest.mark.parametrize("change", VARIANTS[1:])  # the plain one is killed in `tests/train/test_tasks.py`
def test_resume_gives_same_bits(change: dict[str, Any], folder: Path, tmp_path: Path) -> None:
    check_resume(partial(train, folder, changed(**change)), tmp_path, kill=3)


def test_sigterm_between_updates_of_a_step(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four updates use a record. A signal in the second one waits for the others, since a half-used record is no state."""
    config = changed(algorithm="ppo", update={"epochs": 2, "minibatches": 2})
    whole, *_ = train(folder, config)
    accumulate = UpdateState.accumulate

    def signalled(self: Any, loss: Loss) -> None:
        if self.steps == 5:
            signal.raise_signal(signal.SIGTERM)
        accumulate(self, loss)

    with (
        monkeypatch.context() as patch,
        pytest.raises(PreemptedError, match="a checkpoint of step 2 is written"),
    ):
        patch.setattr(UpdateState, "accumulate", signalled)
        train(folder, config, checkpoint_dir=tmp_path)
    again, *_ = train(folder, config, checkpoint_dir=tmp_path)
    assert same_weights(whole, again)


def versions(experience: Experience) -> torch.Tensor:
    """Return the policy version of each sampled token."""
    return experience.batch["version"][experience.batch["loss_mask"]]


@pytest.mark.xdist_group("ray")
def test_ray_worker_matches_serial(folder: Path, ray_cluster: Any) -> None:
    ahead = workers(backend="ray", **LOCKSTEP)
    other, _, _ = train(folder, LEARNING.model_copy(update={"async_rollout": ahead}))
    serial, _, _ = train(folder, LEARNING)
    assert same_weights(serial, other)


def test_async_workers_report_policy_lag(folder: Path) -> None:
    ahead = workers(prefetch=2, max_policy_lag=2, importance="truncate")
    _, history, seen = train(folder, changed(async_rollout=ahead, steps=8))
    assert max(t["policy_lag/max"] for t in history) <= 2
    for step, experience in enumerate(seen):
        assert step - 3 <= versions(experience).min() and versions(experience).max() <= step
    assert all("importance/effective_sample_size" in t for t in history)


def test_equal_rewards_change_nothing(folder: Path) -> None:
    net, history, _ = train(folder, verifier="exact")
    assert all(t["zero_std_groups"] == SMALL.prompts_per_step and t["grad_norm"] == 0 for t in history)
    assert same_weights(net, network())


def test_expert_iteration_is_sft_on_passing_completions(folder: Path) -> None:
    config = changed(algorithm="expert_iteration", steps=1, prompts_per_step=12, group_size=8)
    _, (metrics,), (seen,) = train(folder, config)
    batch, passed = seen.batch, seen.passed
    assert 0 < passed.sum() < seen.rows
    log_prob = batch["behaviour_log_prob"][batch["loss_mask"] & passed[:, None]]
    assert metrics["loss_tokens"] == len(log_prob) and metrics["loss"] == pytest.approx(
        -float(log_prob.mean()), rel=1e-5
    )
    with pytest.raises(
        ConfigError, match=r"none of the first 12 completions passes.*\n.*\n.*fine-tune it first"
    ):
        train(folder, changed(algorithm="expert_iteration"), verifier="exact")


@pytest.mark.parametrize(
    ("algorithm", "changes", "becomes"),
    [
        ("grpo", {"loss": {"scale_rewards": "none", "aggregation": "constant"}}, "dr_grpo"),
        ("grpo", {"loss": {"ratio": "sequence"}, "update": {"clip": (3e-4, 4e-4)}}, "gspo"),
        ("reinforce", {"loss": {"baseline": "leave_one_out"}}, "rloo"),
        ("ppo", {"loss": {"baseline": "group", "scale_rewards": "unbiased", "aggregation": "sequence"}}, "grpo"),
        ("gspo", {"loss": {"ratio": "none", "aggregation": "token", "baseline": "batch", "scale_rewards": "none"}},
         "reinforce"),
    ],
)  # fmt: skip
def test_overrides_turn_algorithm_into_another(
    algorithm: str, changes: dict[str, Any], becomes: str, folder: Path
) -> None:
    given = {**SMALL.model_dump(exclude_unset=True), "steps": 2}
    runs = ({**changes, "algorithm": algorithm}, {"algorithm": becomes}, {"algorithm": algorithm})
    given_runs = ({**given, **run, "update": {"epochs": 2, **run.get("update", {})}} for run in runs)
    net, same, plain = (train(folder, RLConfig.model_validate(run))[0] for run in given_runs)
    assert same_weights(net, same) and not same_weights(net, plain)


OWN = "tests.support.train.own_objectives"


def test_own_algorithm_of_known_parts_equals_preset(folder: Path) -> None:
    runs = [changed(steps=2, algorithm=name) for name in (f"{OWN}:LEAVE_ONE_OUT", "rloo")]
    (net, *_), (same, *_) = (train(folder, run) for run in runs)
    assert same_weights(net, same)


def test_own_algorithm_is_a_function_like_policy_loss(folder: Path, tmp_path: Path) -> None:
    config = changed(steps=2, algorithm=f"{OWN}:doubled")
    _, history, _ = train(folder, config)
    _, usual, _ = train(folder, changed(steps=2))
    assert usual[0]["grad_norm"] * 2 == pytest.approx(history[0]["grad_norm"], rel=1e-4)
    assert history[0]["doubled"] == history[0]["loss"] and history[0].keys() - usual[0].keys() == {"doubled"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            f"{OWN}:smoothed",
            "cannot be called: missing a required argument.*\n  expected: a PolicyLossConfig, or",
        ),
        (f"{OWN}:absent", "the algorithm .* cannot be imported"),
        (
            f"{OWN}:counts_tokens",
            "the count of algorithm .*counts_tokens' is .*\n.* loss.aggregation = 'sequence'",
        ),
    ],
)
def test_wrong_own_algorithm_is_named(name: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        train(folder, changed(algorithm=name))
    with pytest.raises(ValidationError, match="did you mean 'grpo'"):
        RLConfig(algorithm="grp")


def test_grpo_with_coefficient_uses_kl_of_its_paper() -> None:
    assert resolve_method(changed(algorithm="grpo")).kl_coef == 0.0  # default: no reference
    method = resolve_method(changed(algorithm="grpo", kl=KLConfig(coef=PRESETS["grpo"].kl_coef)))
    assert (method.kl_coef, method.kl_estimator, method.kl_apply_to) == (0.04, "k3", "loss")
    log_prob = torch.tensor([-1.0, -2.0], requires_grad=True)
    tokens = CompletionTokens(
        log_prob, log_prob.detach(), torch.zeros(2), torch.tensor([0, 0]),
        reference_log_prob=torch.tensor([-1.5, -2.0]),
    )  # fmt: skip
    total = policy_loss(tokens, method).total.detach()
    # d = log pi - log ref = (0.5, 0), k3 = e^-d - 1 + d, mean over the two tokens of the completion
    assert float(total) == pytest.approx(0.04 * (math.exp(-0.5) - 1 + 0.5) / 2, abs=1e-7)


@pytest.mark.parametrize("lora", [None, LORA])
def test_entropy_bonus_raises_entropy(lora: LoRAConfig | None, folder: Path) -> None:
    config = changed(loss=PolicyLossOverrides(entropy_coef=0.1), lora=lora)
    _, history, _ = train(folder, config, verifier="exact")  # rewards without a signal
    assert history[-1]["entropy"] > history[0]["entropy"]


def test_verifier_error_is_counted(folder: Path) -> None:
    permit_code("json:loads")
    _, history, _ = train(folder, verifier="custom:json:loads")
    assert len(history) == SMALL.steps
    assert all(t["verifier_errors"] > 0 and np.isfinite(t["policy_loss"]) for t in history)


def kill_worker_at(step: int) -> Callable[[int], None]:
    def kill(done: int) -> None:
        if done == step:
            (worker,) = children("producer")
            worker.kill()

    return kill


def test_killed_lockstep_worker_keeps_bits(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Rollouts that may not be older than the weights equal serial sampling, bit for bit, also after a kill.

    Killed during verification; the next worker draws tasks from the learner's curriculum.
    """
    monkeypatch.setenv("WHORL_TEST_STRIKES", str(tmp_path))
    permit_code("tests.support.align.killing_verifier:verify")
    run = partial(train, folder, verifier="custom:tests.support.align.killing_verifier:verify")
    config = LEARNING.model_copy(update={"prompts_per_step": 4})
    serial, history, _ = run(config)
    assert sum(t["grad_norm"] > 0 for t in history) >= 3
    ahead = config.model_copy(update={"async_rollout": workers(**LOCKSTEP)})
    other, history, seen = run(ahead, at=lambda step: (tmp_path / "armed").touch() if step == 3 else None)
    assert all(versions(experience).eq(step).all() for step, experience in enumerate(seen))
    assert [t["worker_restarts"] for t in history] == [0, 0, 0, 1, 0, 0]
    assert same_weights(serial, other)
    struck = int((tmp_path / "struck").read_text())
    _, alive = psutil.wait_procs([psutil.Process(struck)] if psutil.pid_exists(struck) else [], timeout=30)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]  # its children ended too


def test_worker_without_restarts_ends_run_and_resumes(folder: Path, tmp_path: Path) -> None:
    def run(restarts: int, **rest: Any) -> Any:
        config = changed(async_rollout=workers(), steps=9, run={"max_worker_restarts": restarts})
        return train(folder, config, checkpoint_dir=tmp_path, **rest)

    with pytest.raises(ProducerError, match="SIGKILL"):
        run(0, at=kill_worker_at(4))
    assert 0 < len(run(1)[1]) < 9


def test_invalid_settings_are_rejected(folder: Path) -> None:
    worker: Any = None
    with pytest.raises(ConfigError, match="no reference"):
        train_policy(network(), worker, changed(kl=KLConfig(coef=0.1)))
    with pytest.raises(ConfigError, match="needs a critic"):
        train_policy(network(), worker, changed(algorithm="ppo"))
    with pytest.raises(ConfigError, match="does not use a critic"):
        train_policy(network(critic=True), worker, SMALL)
    given = SMALL.model_dump(exclude_unset=True)
    alone = {"group_size": 1, "algorithm": "ppo", "loss": {"baseline": "group"}}
    for wrong, message in (
        (alone, "group compares the completions"),
        ({"algorithm": "rloo", "update": {"clip": (0.2, 0.2)}}, "clip is set, but rloo has no ratio"),
        ({"loss": {"ratio": "none", "dual_clip": 3}}, "loss.dual_clip is set"),
        ({"async_rollout": {"importance": "trace", "importance_level": "mean"}}, "a trace needs level token"),
    ):
        with pytest.raises(ValidationError, match=message):
            RLConfig.model_validate(given | wrong)
    assert RLConfig.model_validate(given | {"group_size": 1, "loss": {"baseline": "none"}}).group_size == 1


def test_filter_by_length_counts_rejected_tasks() -> None:
    long = VerifiableTask(id="long", prompt="x" * 40, answer="")
    found, left = filter_by_length(scribe(), [*tasks(3), long], 24, 5)
    assert [task.id for task in found] == ["0", "1", "2"]
    assert left == {"prompt longer than 19 ids": 1}


@pytest.mark.parametrize("change", VARIANTS)
def test_replicas_match_single_process(change: dict[str, Any], folder: Path) -> None:
    threads, seen = torch.get_num_threads(), list[list[Experience]]()

    def run(n: int) -> tuple[PolicyModel, History]:
        net, history, experiences = train(folder, changed(prompts_per_step=4, run={"replicas": n}, **change))
        seen.append(experiences)
        return net, history

    assert all(t["logprob_diff_max"] < 1e-4 for t in check_replicas(run))
    assert torch.get_num_threads() == threads  # restored
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a.batch["targets"], b.batch["targets"]) and torch.equal(a.reward, b.reward)
        for name in ("resampled_groups", "failed_verifications"):
            assert getattr(a, name) == getattr(b, name)


def test_uneven_shards_stop_at_same_time(folder: Path) -> None:
    change = {
        "run": {"replicas": 3, "max_train_seconds": 0.5},
        "steps": 10**6,
        "sampling": {"dynamic_sampling_rounds": 1},
    }
    _, history, _ = train(folder, changed(prompts_per_step=4, **change))
    assert 1 <= len(history) < 10**5


def test_time_limit_bounds_the_flops_of_a_stage(folder: Path) -> None:
    """Kernels are timed and compiled for the steps that fit, not for those that are set."""
    net = network()
    flops = [
        PolicyTask(net, worker_of(net, folder), changed(steps=10**9, run={"max_train_seconds": limit})).flops
        for limit in (None, 0.5, 1.0)
    ]
    assert 2 * flops[1] == flops[2] == probe().peak_flops < flops[0]


def test_replica_error_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"tokenizer_path": Path("/nowhere")}
    monkeypatch.setattr(RolloutWorker, "__getstate__", lambda self: {**vars(self), **wrong})
    with pytest.raises(ReplicaError, match=r"replica 1 failed:(.|\n)*nowhere"):
        train(folder, changed(prompts_per_step=4, run={"replicas": 2}))


def test_choose_rl_replicas_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    net, ahead = network(), SMALL.async_rollout.model_copy(update={"workers": 1})

    def choose(uses_reward_model: bool = False, **changes: Any) -> int:
        config = changed(**{"steps": 10**9, **changes})
        return choose_rl_replicas(config, net, 24, uses_reward_model=uses_reward_model)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    assert choose(steps=SMALL.steps) == 1  # a stage of milliseconds
    assert choose() == SMALL.prompts_per_step and choose(run={"replicas": 2}) == 2
    assert choose(uses_reward_model=True) == choose(async_rollout=ahead) == 1
    assert choose(prompts_per_step=12) == 6  # two rounds, as with eight
    with pytest.raises(ValueError, match="use one of them"):
        RLConfig(run={"replicas": 2}, async_rollout=ahead)


def test_shards_are_contiguous_and_cover_all() -> None:
    for n in range(10):
        for size in (1, 2, 3, 7):
            shares = [ReplicaGroup(ProcessGroup(rank, size)).shard(n) for rank in range(size)]
            assert [i for share in shares for i in share] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1
