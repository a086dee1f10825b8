"""Rollouts: tasks in, judged answers out, as records in slots. The producer of RL from verifiable rewards.

A record is G tasks with K answers each, R = G K rows; row g K + k is answer k to task g. Of each id it keeps the
log-probability that it was drawn with and the version of the weights that drew it; of each answer, what the verifiers said.
The same producer works in lock-step with the learner, in a process of its own that runs ahead, or behind Ray: `slots/` runs
it, and nothing here knows which (idea 2 of the house).

    tasks   drawn by a curriculum that remembers how often each was solved (`data/curriculum.py`)
    answers by the engine, at the policy's temperature, with nothing cut off its distribution
    rewards by the verifiers, those of programs in a sandbox; or by a reward model, the `judge`, in their place

With `redraws` a group of which all answers got the same reward, from which a group-relative advantage learns nothing, is
put aside and another task is drawn in its place (DAPO's dynamic sampling, arXiv:2503.14476, eq. 11).

The subtle part is weights that change under way. In lock-step they do not. Running ahead, the engine may take new ones
between two steps (`in_flight`), so that the ids of one answer are of several versions; each says its own, and the record's
own version is the oldest.
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

from whorl.align.config import AsyncRolloutConfig
from whorl.align.data.curriculum import Curriculum, resample
from whorl.align.model.example import ExampleTokenizer
from whorl.align.model.sampling import Completion, policy_sampling, rollout_engine, sample_completions
from whorl.align.preference.reward_model import load_reward_verifier
from whorl.align.rl.replicas import ReplicaGroup
from whorl.errors import ConfigError, DataError
from whorl.evals.verify import verify_all
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.models import ModelConfig, make_model
from whorl.sandbox import Sandbox
from whorl.slots import BoardReader, Slot, Spec
from whorl.tokens.chat import load_chat_template
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tracking.seeds import derive

NEEDS_SANDBOX = frozenset({"doctest", "unittest"})


@dataclass(frozen=True)
class Rollouts:
    """R rows of up to T ids. prompt: how many of `ids` were given; length: how many there are in all.

    behaviour_log_prob, version: of each id that was sampled; reward, passed: by the verifier; finished: ended by itself;
    task: its number among the tasks; redrawn: groups that others took the place of; broken: answers whose verifier failed.
    """

    ids: Annotated[NDArray[np.int64], "R", "T"]
    behaviour_log_prob: Annotated[NDArray[np.float32], "R", "T"]
    version: Annotated[NDArray[np.int64], "R", "T"]
    prompt_length: Annotated[NDArray[np.int64], "R"]
    length: Annotated[NDArray[np.int64], "R"]
    reward: Annotated[NDArray[np.float32], "R"]
    passed: Annotated[NDArray[np.bool_], "R"]
    finished: Annotated[NDArray[np.bool_], "R"]
    task: Annotated[NDArray[np.int64], "R"]
    resampled_groups: Annotated[NDArray[np.int64], 1]
    failed_verifications: Annotated[NDArray[np.int64], 1]


@dataclass(frozen=True)
class RolloutGroup:
    """The answers to one task, and what the verifiers said of each."""

    task: int
    completions: list[Completion]
    verdicts: list[Verdict]


def rollout_spec(groups: int, group_size: int, length: int) -> Spec[Rollouts]:
    """Of records of `groups` tasks with `answers` answers each, in rows of `length` ids."""
    return Spec.from_dataclass(Rollouts, R=groups * group_size, T=length)


def shared_rollout_buffers(rows: int, length: int) -> dict[str, Tensor]:
    """What replicas gather a record through (`peers.py`): its fields with a row an answer, and what is asked of weights."""
    fields = {
        name: torch.from_numpy(np.zeros(field.shape, field.dtype))
        for name, field in rollout_spec(rows, 1, length).fields.items()
        if field.shape[0] == rows
    }
    asked = {name: torch.zeros(rows, length) for name in ("log_prob", "value", "reference_log_prob")}
    return {name: t.share_memory_() for name, t in {**fields, **asked}.items()}  # type: ignore[no-untyped-call]


@dataclass
class RolloutWorker:
    """Answers tasks with the board's newest weights. It pickles small: engine and sandbox are made where it runs.

    Args:
        model: the shape of the policy; dtype: what it computes in.
        tokenizer: folder of the tokenizer, and of its chat template if there is one.
        tasks: those that have room (`with_room`).
        length: ids of a row, prompt and answer.
        curriculum: which are drawn.
        in_flight: take new weights between two steps of the engine.
        threads: of torch, in a process of its own; None leaves them.
        judge: folder of a reward model, which is loaded where the worker runs; None asks the verifiers.
        device: of the engine, and of the judge (`placed` says which).
    """

    model_config: ModelConfig
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

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.curriculum = self.curriculum.copy()  # arrays that came through Ray's object store are read-only

    def join_group(self, group: ReplicaGroup) -> None:
        """From now on it answers its share of each record's tasks, and has the other answers from its peers."""
        self._replica_group = group

    @property
    def replica_group(self) -> ReplicaGroup:
        """Those it shares records with: by default nobody."""
        return getattr(self, "_replica_group", None) or ReplicaGroup()

    def setup(self, rows: int = 64) -> None:
        """Makes engine, scribe and sandbox; `fill` does it where nobody did."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        network = make_model(self.model_config, torch.Generator(), getattr(torch, self.dtype))
        network.requires_grad_(False).eval().to(self.device)
        tokenizer = load_tokenizer(self.tokenizer_path)
        self._example_tokenizer = ExampleTokenizer(
            tokenizer, load_chat_template(self.tokenizer_path, tokenizer)
        )
        self._engine = rollout_engine(
            network,
            self._example_tokenizer,
            sequences=min(128, rows),
            max_length=self.max_seq_len,
            **self.engine_options,
        )
        self._engine.version = -1  # that of nobody: the first look at the board loads
        self._prompts: dict[int, list[int]] = {}
        self._reward_verifier = (
            None
            if self.reward_model is None
            else load_reward_verifier(self.reward_model, self.dtype, self.device)
        )
        self._sandbox: Sandbox | None = None
        if self._reward_verifier is None and any(
            name in task.verifier for task in self.tasks for name in NEEDS_SANDBOX
        ):
            self._sandbox = Sandbox() if self.replica_group.is_single else Sandbox(workers=1)  # a core each

    def close(self) -> None:
        """Ends the sandbox."""
        if getattr(self, "_sandbox", None) is not None:
            self._sandbox.close()  # type: ignore[union-attr]
            self._sandbox = None

    def fill(self, slot: Slot[Rollouts], weights: BoardReader, rng: np.random.Generator) -> int:
        """Writes one record; returns how many ids were sampled."""
        if not hasattr(self, "_engine"):
            most = -(-(len(slot.data.reward) // self.group_size) // self.replica_group.process_group.size)
            self.setup(most * self.group_size)
        data, k = slot.data, self.group_size
        groups = len(data.reward) // k
        self._engine.sync_weights(weights.board)
        self._engine.follow_board(weights.board if self.update_in_flight else None)
        attempts = count()

        def roll(tasks: Sequence[int]) -> list[tuple[RolloutGroup, list[float]]]:
            made = self._sample_groups(tasks, derive(slot.seed, "answers", next(attempts)))
            return [(group, [v.reward for v in group.verdicts]) for group in made]

        found = resample(self.curriculum, roll, groups, rng, max_rounds=1 + self.dynamic_sampling_rounds)
        again = found.uninformative[: groups - len(found.informative)]  # there was nothing better
        kept = found.informative + again
        data.resampled_groups[0] = len(found.uninformative) - len(again)
        sampled, oldest, mine = 0, 1 << 62, list[int]()
        for g, group in enumerate(kept):
            if not group.completions:  # a peer's
                continue
            mine += range(g * k, (g + 1) * k)
            prompt = self._prompt(group.task)
            for i, (one, verdict) in enumerate(zip(group.completions, group.verdicts, strict=True)):
                row, start, stop = g * k + i, len(prompt), len(prompt) + len(one.ids)
                data.ids[row, :start], data.ids[row, start:stop] = prompt, one.ids
                data.behaviour_log_prob[row, start:stop] = np.array(one.log_probs, np.float32)
                data.version[row, start:stop] = one.versions
                data.prompt_length[row], data.length[row], data.task[row] = start, stop, group.task
                data.reward[row] = np.float32(verdict.reward)
                data.passed[row], data.finished[row] = verdict.passed, one.finished
                sampled += len(one.ids)
                oldest = min(oldest, *one.versions) if one.versions else oldest
        data.failed_verifications[0] = sum(v.failed for group in kept for v in group.verdicts)
        weights.version = oldest if sampled else self._engine.version
        if not self.replica_group.is_single:
            views = slot.tensors()
            shared = {name: view for name, view in views.items() if len(view) == len(data.reward)}
            self.replica_group.all_gather_rows(shared, torch.tensor(mine, dtype=torch.int64))
        return sampled

    def _sample_groups(self, drawn: Sequence[int], seed: int) -> list[RolloutGroup]:
        """Of the tasks drawn; those that peers answered without their answers."""
        k, share = self.group_size, self.replica_group.shard(len(drawn))
        mine = [drawn[g] for g in share]
        prompts = [self._prompt(task) for task in mine for _ in range(k)]
        found = sample_completions(
            self._engine, prompts, policy_sampling(self.temperature),
            max_tokens=self.max_completion_tokens, stop_ids=self._example_tokenizer.stop_ids, seed=seed, first_index=share.start * k,
        )  # fmt: skip
        tasks = [self.tasks[task] for task in mine for _ in range(k)]
        said = [self._example_tokenizer.decode(one.ids) for one in found]
        verdicts = (
            verify_all(tasks, said, self._sandbox)
            if self._reward_verifier is None
            else self._reward_verifier(tasks, said)
        )
        own = [
            RolloutGroup(t, found[i * k : i * k + k], verdicts[i * k : i * k + k]) for i, t in enumerate(mine)
        ]
        if self.replica_group.is_single:
            return own
        told = self.replica_group.all_gather_list([x for v in verdicts for x in (v.reward, float(v.failed))])
        heard = [
            Verdict(reward, False, failed=bool(f)) for reward, f in zip(told[::2], told[1::2], strict=True)
        ]
        groups = [RolloutGroup(task, [], heard[g * k : g * k + k]) for g, task in enumerate(drawn)]
        groups[share.start : share.stop] = own
        return groups

    def _prompt(self, task: int) -> list[int]:
        if task not in self._prompts:
            one = self.tasks[task]
            self._prompts[task] = self._example_tokenizer.prompt(one.prompt or one.messages)
        return self._prompts[task]


def assign_devices(
    worker: RolloutWorker, ahead: AsyncRolloutConfig, learner: torch.device
) -> list[RolloutWorker]:
    """The workers of a run, each with its device: in lock-step, where each waits for the other anyway, the learner's; ahead
    of it what `ahead.device` says. A process of its own is a fresh interpreter (`slots/producers.py`), as CUDA wants it.

    auto: never on the learner's GPU, whose time and memory it would take. cuda: there too, if there is no other. Ray gives
    an actor a GPU of its own, if it is asked for one, and what a cluster has cannot be seen from here: auto means CPUs.

    Raises:
        ConfigError: GPUs are asked for, and there are none.
    """
    if not ahead.workers:
        worker.device = str(learner)
        return [worker]
    devices, gpus = ["cpu"], torch.cuda.device_count()
    if ahead.backend == "ray":
        devices = ["cuda"] if ahead.device == "cuda" else ["cpu"]
    elif ahead.device == "cuda" or (ahead.device == "auto" and learner.type == "cuda"):
        others = [f"cuda:{n}" for n in range(gpus) if learner.type != "cuda" or n != (learner.index or 0)]
        devices = others or ([str(learner)] if ahead.device == "cuda" and gpus else ["cpu"])
        if ahead.device == "cuda" and not gpus:
            raise ConfigError(
                "async_rollout.device is cuda, and torch sees no GPU here", expected="a machine with one",
                do="take auto, or cpu",
            )  # fmt: skip
    return [replace(worker, device=devices[n % len(devices)]) for n in range(ahead.workers)]


def filter_by_length(
    example_tokenizer: ExampleTokenizer, tasks: Sequence[VerifiableTask], length: int, max_tokens: int
) -> tuple[list[VerifiableTask], dict[str, int]]:
    """(tasks whose prompt leaves room for an answer, reasons of the others with their count)."""
    found: list[VerifiableTask] = []
    left: dict[str, int] = {}
    for task in tasks:
        try:
            n = len(example_tokenizer.prompt(task.prompt or task.messages))
        except DataError as error:
            reason = str(error).splitlines()[0]
            left[reason] = left.get(reason, 0) + 1
            continue
        if n + max_tokens <= length:
            found.append(task)
        else:
            reason = f"prompt longer than {length - max_tokens:,} ids"
            left[reason] = left.get(reason, 0) + 1
    return found, left
