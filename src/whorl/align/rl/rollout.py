"""Rollout worker: runs episodes of tasks and writes a rollout batch into a slot.

A rollout batch has G tasks with K completions each, R = G K rows; row g K + k is completion k of task g. For each id it
keeps the log-probability under the sampling weights and the version of those weights. The same producer runs in
lockstep with the learner, in a process that samples ahead, or in Ray; `slots/` runs it.

    tasks        drawn by a curriculum that tracks pass rates (`data/curriculum.py`)
    completions  sampled by the engine at the policy's temperature, without top-k or top-p (`evals/episodes`)
    rewards      from verifiers, those of programs in a sandbox, from a reward model, or from an environment

With `dynamic_sampling_rounds` a group with equal rewards, from which a group-relative advantage learns nothing, is
replaced by a group of another task (DAPO's dynamic sampling, arXiv:2503.14476, eq. 11).

The engine begins with the learner's compute dtype. After the first rollout batch of a long stage it takes the fastest type
whose log-probabilities stay near the learner's, and leaves it when they no longer do (`model/sampling_dtype.py`).

The subtle point is a change of weights during sampling. In lockstep weights do not change. A worker that samples
ahead may update between two engine steps (`update_in_flight`), so the ids of one completion may have several
versions. Each id records its version, and the version of the rollout batch is the oldest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.align.data.curriculum import Curriculum, resample
from whorl.align.environments import EnvironmentConfig
from whorl.align.model.sampling_dtype import CANDIDATES, RolloutSampler
from whorl.align.preference.reward_model import load_reward_verifier
from whorl.align.rl.config import AsyncRolloutConfig, RolloutConfig
from whorl.align.rl.replicas import ReplicaGroup, worker_devices
from whorl.evals.episodes import EngineSampler, Episode, EpisodeRunner, make_env_loop
from whorl.evals.grading import Grade, VerifiableTask
from whorl.evals.model.sampling import policy_sampling
from whorl.models import TransformerConfig, make_model
from whorl.slots import BoardReader, Slot, Spec
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.seeds import derive
from whorl.train.determinism import deterministic

ROLLOUT_DTYPES = (*CANDIDATES, "float16")
REASON_BYTES = 160  # of the reason of a reward; longer ones are cut


@dataclass(frozen=True)
class Rollouts:
    """R rows of up to T ids. action_mask: True for ids that the policy sampled. length: ids of the row.

    behaviour_log_prob, version: of each sampled id. reward, passed: from the verifier. finished: ended with a stop id.
    task: index. turns, tool_calls, malformed_calls, env_errors: counts of each row. resampled_groups: groups that were
    replaced. failed_verifications: completions whose verifier failed. reason: of the reward, UTF-8 padded with NUL.
    dtype: of the sampler, index into `ROLLOUT_DTYPES`. dtype_difference: mean difference of its log-probabilities to
    the learner's, 0 where it was not compared.
    """

    ids: Annotated[NDArray[np.int64], "R", "T"]
    action_mask: Annotated[NDArray[np.bool_], "R", "T"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "R", "T"]
    version: Annotated[NDArray[np.int64], "R", "T"]
    length: Annotated[NDArray[np.int64], "R"]
    reward: Annotated[NDArray[np.float32], "R"]
    passed: Annotated[NDArray[np.bool_], "R"]
    finished: Annotated[NDArray[np.bool_], "R"]
    task: Annotated[NDArray[np.int64], "R"]
    turns: Annotated[NDArray[np.int64], "R"]
    tool_calls: Annotated[NDArray[np.int64], "R"]
    malformed_calls: Annotated[NDArray[np.int64], "R"]
    env_errors: Annotated[NDArray[np.int64], "R"]
    resampled_groups: Annotated[NDArray[np.int64], 1]
    failed_verifications: Annotated[NDArray[np.int64], 1]
    reason: Annotated[NDArray[np.uint8], "R", REASON_BYTES]
    dtype: Annotated[NDArray[np.int64], 1]
    dtype_difference: Annotated[NDArray[np.float32], 1]


@dataclass(frozen=True)
class RolloutGroup:
    """Episodes of one task and their grades."""

    task: int
    episodes: list[Episode]
    grades: list[Grade]


def rollout_spec(groups: int, group_size: int, length: int) -> Spec[Rollouts]:
    """Return the slot layout of `groups` tasks with `group_size` completions each, in rows of `length` ids."""
    return Spec.from_dataclass(Rollouts, R=groups * group_size, T=length)


def shared_rollout_buffers(rows: int, length: int) -> dict[str, Tensor]:
    """Return shared memory to gather a rollout batch (`rl/replicas.py`): fields with R rows, and scored values."""
    fields = {
        name: torch.from_numpy(np.zeros(field.shape, field.dtype))
        for name, field in rollout_spec(rows, 1, length).fields.items()
        if field.shape[0] == rows
    }
    scored = {name: torch.zeros(rows, length) for name in ("log_prob", "value", "reference_log_prob")}
    return {name: t.share_memory_() for name, t in {**fields, **scored}.items()}  # type: ignore[no-untyped-call]


@dataclass
class RolloutWorker:
    """Samples completions with the newest weights of the board.

    It pickles small: the engine is built in the worker process.

    Args:
        model_config: shape of the policy. dtype: its compute dtype.
        tokenizer_path: folder of the tokenizer and its chat template.
        tasks: tasks that fit into a row (`filter_by_length`).
        max_seq_len: ids of a row, prompt and completion.
        curriculum: selects tasks.
        update_in_flight: accept new weights between two engine steps.
        threads: of torch, in a worker process; None keeps the setting.
        environment: of several turns; None verifies one completion.
        reward_model: folder of a reward model, loaded in the worker process; None uses the verifiers.
        device: of the engine and the reward model (see `worker_devices`).
        deterministic: no timing decides a bit, in a worker process too (`train/determinism.py`).
        rollout: the type of the sampler. rollout_dtype: with auto, the type in use; None until it is chosen.
    """

    model_config: TransformerConfig
    dtype: str
    tokenizer_path: Path
    tasks: Sequence[VerifiableTask]
    group_size: int
    max_completion_tokens: int
    max_seq_len: int
    temperature: float
    curriculum: Curriculum
    dynamic_sampling_rounds: int = 0
    update_in_flight: bool = False
    threads: int | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    reward_model: Path | None = None
    device: str = "cpu"
    environment: EnvironmentConfig | None = None
    deterministic: bool = False
    rollout: RolloutConfig = field(default_factory=lambda: RolloutConfig(dtype="model"))
    rollout_dtype: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.curriculum = self.curriculum.copy()  # arrays from Ray's object store are read-only

    def join_group(self, group: ReplicaGroup) -> None:
        """Sample only this replica's share of each rollout batch from now on, and gather the rest."""
        self._replica_group = group

    @property
    def replica_group(self) -> ReplicaGroup:
        """Return the group of this replica; by default a group of one."""
        return getattr(self, "_replica_group", None) or ReplicaGroup()

    def setup(self, rows: int = 64) -> None:
        """Build engine, tokenizer and sandbox; `fill` calls this when needed."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        network = make_model(self.model_config, torch.Generator(), getattr(torch, self.dtype))
        network.requires_grad_(False).eval().to(self.device)
        encoder = self._encoder = TokenEncoder.load(self.tokenizer_path)
        shares_cores = self.threads is not None or not self.replica_group.is_single
        options = {
            **({"max_threads": torch.get_num_threads()} if shares_cores else {}),
            **self.engine_options,
        }
        self._sampler = RolloutSampler(
            network, encoder, sequences=min(128, rows), max_length=self.max_seq_len,
            temperature=self.temperature, requested=self.rollout.dtype, dtype=self.rollout_dtype,
            bound=self.rollout.bound(self.dtype), agree=self.replica_group.all_gather_max, options=options,
        )  # fmt: skip
        self._sampler.engine.version = -1  # no version, so the first `sync_weights` loads
        verifier = (
            None
            if self.reward_model is None
            else load_reward_verifier(self.reward_model, self.dtype, self.device)
        )
        workers = None if self.replica_group.is_single else 1  # one core per replica
        self._loop = make_env_loop(self.environment, self.tasks, verifier, sandbox_workers=workers)
        self._replies = EngineSampler(self._sampler.engine, encoder, self.max_completion_tokens)
        self._episodes = EpisodeRunner(self._replies, self._loop, self.environment)

    def close(self) -> None:
        """Stop the event loop of the environments and the sandbox."""
        if hasattr(self, "_loop"):
            self._loop.close()

    def fill(self, slot: Slot[Rollouts], weights: BoardReader, rng: np.random.Generator) -> int:
        """Write one rollout batch and return the number of sampled ids."""
        with deterministic(self.deterministic):
            return self._fill(slot, weights, rng)

    def _fill(self, slot: Slot[Rollouts], weights: BoardReader, rng: np.random.Generator) -> int:
        if not hasattr(self, "_sampler"):
            most = -(-(len(slot.data.reward) // self.group_size) // self.replica_group.process_group.size)
            self.setup(most * self.group_size)
        data, k = slot.data, self.group_size
        groups = len(data.reward) // k
        engine = self._replies.engine = self._sampler.engine
        engine.sync_weights(weights.board)
        engine.follow_board(weights.board if self.update_in_flight else None)
        attempts = count()

        def roll(tasks: Sequence[int]) -> list[tuple[RolloutGroup, list[float]]]:
            sampled_groups = self._sample_groups(tasks, derive(slot.seed, "answers", next(attempts)))
            return [(group, [g.value for g in group.grades]) for group in sampled_groups]

        found = resample(self.curriculum, roll, groups, rng, max_rounds=1 + self.dynamic_sampling_rounds)
        filler = found.uninformative[: groups - len(found.informative)]  # fill up with them
        groups_kept = found.informative + filler
        data.resampled_groups[0] = len(found.uninformative) - len(filler)
        sampled, oldest, own_rows = 0, 1 << 62, list[int]()
        for g, group in enumerate(groups_kept):
            if not group.episodes:  # sampled by another replica
                continue
            own_rows += range(g * k, (g + 1) * k)
            for row, episode in enumerate(group.episodes, g * k):
                length = len(episode.ids)
                data.length[row], data.task[row] = length, group.task
                data.ids[row, :length] = episode.ids
                data.action_mask[row, :length] = episode.action_mask
                data.behaviour_log_prob[row, :length] = np.array(episode.log_probs, np.float32)
                data.version[row, :length] = episode.versions
                data.reward[row] = np.float32(episode.reward)
                reason = episode.reason.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")
                data.reason[row] = np.frombuffer(reason, np.uint8)
                for name in ("passed", "finished", "turns", "tool_calls", "malformed_calls", "env_errors"):
                    getattr(data, name)[row] = getattr(episode, name)
                sampled += sum(episode.action_mask)
                oldest = min([oldest, *episode.versions_sampled])
        data.failed_verifications[0] = sum(v.failed for group in groups_kept for v in group.grades)
        weights.version = oldest if sampled else engine.version
        data.dtype[0] = ROLLOUT_DTYPES.index(self._sampler.dtype or self.dtype)
        sampled_here = [group.episodes for group in groups_kept if group.episodes]
        data.dtype_difference[0] = np.float32(self._sampler.adapt(sampled_here, slot.seed))
        self.rollout_dtype = self._sampler.dtype
        if not self.replica_group.is_single:
            views = slot.tensors()
            shared = {name: view for name, view in views.items() if len(view) == len(data.reward)}
            self.replica_group.all_gather_rows(shared, torch.tensor(own_rows, dtype=torch.int64))
        return sampled

    def _sample_groups(self, drawn: Sequence[int], seed: int) -> list[RolloutGroup]:
        """Return the groups of the drawn tasks; those of other replicas have grades but no episodes."""
        k, share = self.group_size, self.replica_group.shard(len(drawn))
        own_tasks = [drawn[g] for g in share]
        found = self._episodes.run(
            [self.tasks[task] for task in own_tasks for _ in range(k)],
            policy_sampling(self.temperature),
            seed=seed,
            first_index=share.start * k,
        )
        grades = [episode.grade for episode in found]
        own_groups = [
            RolloutGroup(t, found[i * k : i * k + k], grades[i * k : i * k + k])
            for i, t in enumerate(own_tasks)
        ]
        if self.replica_group.is_single:
            return own_groups
        gathered = self.replica_group.all_gather_list([x for v in grades for x in (v.value, float(v.failed))])
        all_grades = [
            Grade(reward, False, outcome="error" if f else "wrong")
            for reward, f in zip(gathered[::2], gathered[1::2], strict=True)
        ]
        groups = [RolloutGroup(task, [], all_grades[g * k : g * k + k]) for g, task in enumerate(drawn)]
        groups[share.start : share.stop] = own_groups
        return groups


def assign_devices(
    worker: RolloutWorker, config: AsyncRolloutConfig, learner: torch.device
) -> list[RolloutWorker]:
    """Return one worker per process, each with its device: in lockstep the learner's, else by `worker_devices`."""
    if not config.workers:
        worker.device = str(learner)
        return [worker]
    return [replace(worker, device=device) for device in worker_devices(config, learner)]
