"""Sampled completions: ids with the log-probability and weight version of each.

`sample_completions` serves all users: RL rollouts, evaluations, test-time scaling and on-policy distillation. Input and
output are ids. The stop id is part of a completion, because stopping is a choice of the policy.

Among equal prompts, such as the K completions of a task, one is prefilled first, and the others reuse its cached
prefix.

The subtle point is seeds. A completion depends only on its own seed and index, not on the other requests or on
timing. So the same call returns the same completions on every engine, except for ties decided by rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.align.model.example import ExampleTokenizer
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.tracking.seeds import derive

BLOCK_SIZE = 8  # positions


@dataclass
class Completion:
    """ids: sampled ids with the stop id. log_probs: of each id. versions: of the weights that sampled each id.

    finished: ended with a stop id, not at the length limit.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False


def policy_sampling(temperature: float) -> SamplingParams:
    """Return parameters that sample the full distribution: training must use the distribution that was sampled from."""
    if temperature <= 0:
        raise ConfigError(
            f"temperature is {temperature:g}",
            expected="above 0, so that the policy explores",
            do="set it to 1",
        )
    return SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)


def rollout_engine(
    model: LanguageModel,
    example_tokenizer: ExampleTokenizer,
    *,
    sequences: int,
    max_length: int,
    **options: Any,
) -> Engine:
    """Return an engine tuned for throughput, with small blocks so that completions share prefixes.

    It has no time-dependent decisions, so its completions do not depend on earlier requests.
    """
    vocab = model.config.vocab_size
    n_tokens = len(example_tokenizer.tokenizer.token_bytes)
    row_length = -(-max_length // BLOCK_SIZE) * BLOCK_SIZE
    config = EngineConfig(
        max_num_seqs=sequences, max_model_len=max_length, kv_cache_tokens=sequences * row_length, block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, 2 * sequences), max_decode_slowdown=math.inf, **options,
    )  # fmt: skip
    return Engine(model, config, banned_ids=banned_ids(example_tokenizer, vocab, n_tokens))


def banned_ids(example_tokenizer: ExampleTokenizer, vocab_size: int, n_tokens: int) -> list[int]:
    """Return the ids that are never sampled: control ids, and padding rows of the vocabulary matrix."""
    return sorted({*example_tokenizer.control_ids, *range(n_tokens, vocab_size)} - example_tokenizer.stop_ids)


def sample_completions(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
    first_index: int = 0,
    on_finished: Callable[[int], None] = lambda _: None,
) -> list[Completion]:
    """Return completions of `prompts`, in order.

    Args:
        seed: each completion has its own seed, derived from its index; first_index: index of the first.
        on_finished: called with the number of completions that just ended.

    Raises:
        ConfigError: a prompt is too long; its index is named.
    """
    completions = [Completion() for _ in prompts]

    for n, ids in enumerate(prompts):
        if len(ids) >= engine.max_positions:
            raise ConfigError(
                f"prompt {n} has {len(ids):,} ids, and the engine holds {engine.max_positions:,}",
                expected="shorter prompts", do="leave it out, or increase max_length",
            )  # fmt: skip

    def submit(indices: Sequence[int]) -> None:
        for n in indices:
            params = (
                sampling
                if sampling.temperature == 0
                else sampling.model_copy(update={"seed": derive(seed, first_index + n)})
            )
            limit = min(max_tokens, engine.max_positions - len(prompts[n]))
            engine.add(
                Request(
                    id=str(n), ids=tuple(prompts[n]), sampling=params, max_tokens=limit, stop_ids=stop_ids
                )
            )

    def step() -> None:
        n_finished = 0
        for delta in engine.step():
            completion = completions[int(delta.request_id)]
            for token in delta.tokens:
                completion.ids.append(token.id)
                completion.log_probs.append(token.log_prob)
                completion.versions.append(token.version)
            if delta.finish_reason is not None:
                completion.finished = delta.finish_reason == "stop"
                n_finished += 1
        if n_finished:
            on_finished(n_finished)

    first_index_of: dict[tuple[int, ...], int] = {}
    for n, ids in enumerate(prompts):
        first_index_of.setdefault(tuple(ids), n)
    first_of_prompt = set(first_index_of.values())
    submit(sorted(first_of_prompt))  # equal prompts submitted later find the prefix cached
    if len(first_of_prompt) < len(prompts):
        while any(not completions[n].ids for n in first_of_prompt):
            step()
        submit([n for n in range(len(prompts)) if n not in first_of_prompt])
    while engine.busy:
        step()
    return completions
