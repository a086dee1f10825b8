"""The engine of a rollout worker, in the fastest type whose log-probabilities stay near the learner's.

    candidates    the learner's compute dtype, and float32, bfloat16 and int8 weights of the native step (CPU only)
    difference    mean |log p_sampler - log p_learner| over sampled ids, in nats
    admissible    the learner's dtype, and each candidate whose difference is at most the bound
    choice        the admissible candidate with the fastest decode step, timed on this machine (`machine/kernel_choice.py`)

Both sides use the same weights. A candidate answers prompts of the first rollout batch, and the learner's code scores its
ids. Rounding errors grow as training makes the model confident, so the comparison is repeated on a group of every batch.

The subtle point is the learner's own dtype: sampler and learner are two implementations of it, and their difference is the
noise that any choice has. So it needs no measurement, and the sampler falls back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from whorl.align.model.policy_model import PolicyModel
from whorl.engine.config import EngineConfig
from whorl.engine.cpu.runner import decode_steps, step_shape, timed_rows
from whorl.engine.engine import Engine
from whorl.errors import ConfigError
from whorl.evals.model.sampling import open_engine, policy_sampling, sample_completions
from whorl.machine.kernel_choice import fastest
from whorl.models import LanguageModel
from whorl.tokens.token_encoder import TokenEncoder

CANDIDATES = ("float32", "bfloat16", "int8")
MAX_PROBE_PROMPTS, MAX_PROBE_TOKENS = 16, 32  # of the comparison before the choice


class SampledIds(Protocol):
    """A row of ids: which of them were sampled, with the log-probability and the weight version of each."""

    ids: list[int]
    action_mask: list[bool]
    log_probs: list[float]
    versions: list[int]


def sampler_difference(policy: PolicyModel, rows: Sequence[SampledIds], version: int) -> float:
    """Return mean |log p_sampler - log p_learner| in nats over the ids that `version` sampled, or 0 without any.

    policy: the learner's model with the weights of `version`. A difference that is not finite gives infinity.
    """
    width = max([2, *(len(row.ids) for row in rows)])
    ids, sequence = torch.zeros(len(rows), width, dtype=torch.long), torch.full((len(rows), width), -1)
    log_probs, mask = torch.zeros(len(rows), width), torch.zeros(len(rows), width, dtype=torch.bool)
    for n, row in enumerate(rows):
        size = len(row.ids)
        ids[n, :size], log_probs[n, :size], sequence[n, :size] = (
            torch.tensor(row.ids),
            torch.tensor(row.log_probs),
            n,
        )
        mask[n, :size] = torch.tensor(row.action_mask) & (torch.tensor(row.versions) == version)
    mask = mask[:, 1:]
    if not mask.any():
        return 0.0
    batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "loss_mask": mask, "sequence": sequence[:, 1:]}
    apart: Tensor = (policy.score(batch)["log_prob"] - log_probs[:, 1:])[mask]
    found = float(apart.abs().double().mean())
    return found if math.isfinite(found) else math.inf


class RolloutSampler:
    """An engine of `network` and its type.

    engine: to sample with. dtype: its type; None until it is chosen, while the engine has the learner's.

    Args:
        network: in the learner's compute dtype.
        sequences, max_length: of the engine. options: further fields of its settings.
        requested: "auto", "model" (the learner's dtype), or the type to use.
        dtype: with "auto", the type that an earlier start chose.
        bound: largest admissible difference, in nats.
        agree: returns the largest values over all replicas, so that all choose the same type.

    Raises:
        ConfigError: the requested type cannot run here.
    """

    def __init__(
        self,
        network: LanguageModel,
        encoder: TokenEncoder,
        *,
        sequences: int,
        max_length: int,
        temperature: float,
        requested: str = "model",
        dtype: str | None = None,
        bound: float = 0.0,
        agree: Callable[[Sequence[float]], list[float]] = list,
        options: Mapping[str, Any],
    ) -> None:
        self.encoder, self.sequences, self.max_length = encoder, sequences, max_length
        self.requested, self.bound, self.agree, self.options = requested, bound, agree, options
        network.context_hint = max_length  # as in the engine
        banned = encoder.banned_ids(network.config.vocab_size)
        self._policy = PolicyModel(network, temperature=temperature, banned_ids=banned)
        self.own = str(network.dtype).removeprefix("torch.")
        self.dtype = dtype if requested == "auto" else self.own if requested == "model" else requested
        self.engine = self._make_engine(self.dtype or self.own)

    def _make_engine(self, dtype: str) -> Engine:
        given = {} if dtype == self.own else {"weight_dtype": dtype}
        try:
            return open_engine(
                self._policy.model,
                EngineConfig.for_batch(self.sequences, self.max_length, **{**self.options, **given}),
                self.encoder,
                with_text=False,
            )
        except ConfigError as error:
            if not given:
                raise
            raise ConfigError(
                f"rollout.dtype is {dtype}, which is impossible here: {error}",
                expected=f"auto, model or {self.own}", do="set rollout.dtype to auto",
            ) from error  # fmt: skip

    def adapt(self, groups: Sequence[Sequence[SampledIds]], seed: int) -> float:
        """Choose the type after the first rollout batch; leave it later if its log-probabilities differ too much.

        Returns the difference of this rollout batch, 0 where nothing was compared. groups: rows of each group, perhaps none.
        """
        if self.requested != "auto" or self.dtype == self.own:
            return 0.0
        if self.dtype is None:
            self._choose([row for rows in groups for row in rows[:1] if any(row.action_mask)], seed)
            return 0.0
        own = sampler_difference(self._policy, groups[0] if groups else [], self.engine.version)
        (difference,) = self.agree([own])
        if difference > self.bound:
            self._use(self.own, self._make_engine(self.own))
        return difference

    def _choose(self, rows: Sequence[SampledIds], seed: int) -> None:
        """Measure the candidates on the prompts of some rows, and use the fastest admissible one."""
        rows = rows[:: max(1, -(-len(rows) // MAX_PROBE_PROMPTS))]
        prompts = [row.ids[: row.action_mask.index(True)] for row in rows]
        engines, others = {self.own: self.engine}, [dtype for dtype in CANDIDATES if dtype != self.own]
        differences = list[float]()
        for dtype in others:
            try:
                engines[dtype] = self._make_engine(dtype)
                differences.append(self._probe(engines[dtype], prompts, seed))
            except (ConfigError, MemoryError):  # not on this machine, or not this model
                differences.append(math.inf)
        for dtype, difference in zip(others, self.agree(differences), strict=True):
            if difference > self.bound:
                engines.pop(dtype, None)
        name = f"rollout_step {step_shape(self.engine.runner)} {self.sequences} rows, {' '.join(engines)}"
        steps = {d: decode_steps(engine.runner, timed_rows(self.sequences)) for d, engine in engines.items()}
        chosen = fastest(name, steps)
        self._use(chosen, engines[chosen])

    def _use(self, dtype: str, engine: Engine) -> None:
        """Replace the engine by one over the same weights; its cache holds nothing valid."""
        engine.update_weights({}, self.engine.version)
        self.engine, self.dtype = engine, dtype

    def _probe(self, engine: Engine, prompts: Sequence[list[int]], seed: int) -> float:
        """Return the difference of an engine over its answers to the prompts."""
        answers = sample_completions(
            engine, prompts, policy_sampling(self._policy.temperature),
            max_tokens=min(MAX_PROBE_TOKENS, self.max_length - max(map(len, prompts), default=0)),
            stop_ids=self.encoder.stop_ids, seed=seed,
        )  # fmt: skip
        rows = [_ProbeRow(*row) for row in zip(prompts, answers, strict=True)]
        return sampler_difference(self._policy, rows, engine.version)


class _ProbeRow:
    def __init__(self, prompt: list[int], answer: Any) -> None:
        n, new = len(prompt), len(answer.ids)
        self.ids, self.action_mask = [*prompt, *answer.ids], [False] * n + [True] * new
        self.log_probs, self.versions = [0.0] * n + answer.log_probs, [0] * n + answer.versions
