"""Answers: what an engine samples after prompts, as ids with the log-probability that each was drawn with.

One function, `answer`, for all who sample: rollouts of reinforcement learning, evaluations, test-time scaling, a student
whose own words a teacher judges. Ids in, ids out; the id that ends an answer is one of its ids: to stop is a choice too.

Of prompts that are the same, as the K answers to a task have, one is read in first, and the others find it in the cache.

The subtle part is the seeds. What an answer draws depends on its own seed and place alone, not on what else is in the batch
or when it was let in, so the same call gives the same answers wherever the engine is (up to ties that rounding decides).
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
    """ids: what was sampled, the end included; log_probs: of each, as drawn; versions: of the weights that drew it.

    finished: whether it ended by itself; else the limit cut it off.
    """

    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False


def policy_sampling(temperature: float) -> SamplingParams:
    """Sampling of the whole distribution: what a policy is trained on must be what it acted with, with nothing cut off."""
    if temperature <= 0:
        raise ConfigError(
            f"temperature is {temperature:g}", expected="above 0: a policy explores", do="take 1"
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
    """An engine for throughput: prompts are read in as fast as they can be, and small pages let answers share them.

    Nothing in it goes by the clock, so its answers have the same bits whoever else it answered before.
    """
    vocab = model.config.vocab_size
    words = len(example_tokenizer.tokenizer.token_bytes)
    most = -(-max_length // BLOCK_SIZE) * BLOCK_SIZE
    config = EngineConfig(
        max_num_seqs=sequences, max_model_len=max_length, kv_cache_tokens=sequences * most, block_size=BLOCK_SIZE,
        max_num_batched_tokens=max(2048, 2 * sequences), max_decode_slowdown=math.inf, **options,
    )  # fmt: skip
    return Engine(model, config, banned_ids=banned_ids(example_tokenizer, vocab, words))


def banned_ids(example_tokenizer: ExampleTokenizer, vocab_size: int, n_tokens: int) -> list[int]:
    """Ids that are not sampled: control ids, and rows of the matrix that no token stands behind."""
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
    """Answers to `prompts`, in their order.

    Args:
        seed: of the draws; each answer has a seed of its own, by its place; first: the place of the first.
        advance: told how many answers have come to an end.

    Raises:
        ConfigError: a prompt has no room; its place is named.
    """
    found = [Completion() for _ in prompts]

    for n, ids in enumerate(prompts):
        if len(ids) >= engine.max_positions:
            raise ConfigError(
                f"prompt {n} has {len(ids):,} ids and there is room for {engine.max_positions:,}",
                expected="shorter prompts", do="leave it out, or make max_length larger",
            )  # fmt: skip

    def ask(numbers: Sequence[int]) -> None:
        for n in numbers:
            own = (
                sampling
                if sampling.temperature == 0
                else sampling.model_copy(update={"seed": derive(seed, first_index + n)})
            )
            most = min(max_tokens, engine.max_positions - len(prompts[n]))
            engine.add(
                Request(id=str(n), ids=tuple(prompts[n]), sampling=own, max_tokens=most, stop_ids=stop_ids)
            )

    def step() -> None:
        ended = 0
        for delta in engine.step():
            one = found[int(delta.request_id)]
            for token in delta.tokens:
                one.ids.append(token.id)
                one.log_probs.append(token.log_prob)
                one.versions.append(token.version)
            if delta.finish_reason is not None:
                one.finished = delta.finish_reason == "stop"
                ended += 1
        if ended:
            on_finished(ended)

    leading: dict[tuple[int, ...], int] = {}
    for n, ids in enumerate(prompts):
        leading.setdefault(tuple(ids), n)
    leaders = set(leading.values())
    ask(sorted(leaders))  # whoever asks the same later finds it computed
    if len(leaders) < len(prompts):
        while any(not found[n].ids for n in leaders):
            step()
        ask([n for n in range(len(prompts)) if n not in leaders])
    while engine.busy:
        step()
    return found
