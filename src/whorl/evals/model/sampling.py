"""Sampled completions: ids with the log-probability and weight version of each.

`sample_completions` serves all users: RL rollouts, evaluations, test-time scaling and on-policy distillation. Input and
output are ids. The stop id is part of a completion, because stopping is a choice of the policy.

The subtle point is seeds. A completion depends only on its own seed and index, not on the other requests or on
timing. So the same call returns the same completions on every engine, except for ties decided by rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.evals.model.example import ExampleTokenizer
from whorl.models import LanguageModel
from whorl.tracking.seeds import derive


@dataclass
class SampledCompletion:
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
    """Return an engine for completions (`EngineConfig.for_batch`); options: further fields of its settings."""
    config = EngineConfig.for_batch(sequences, max_length, **options)
    return Engine(model, config, banned_ids=example_tokenizer.banned_ids(model.config.vocab_size))


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
) -> list[SampledCompletion]:
    """Return completions of `prompts`, in order.

    Args:
        seed: each completion has its own seed, derived from its index; first_index: index of the first.
        on_finished: called with the number of completions that just ended.

    Raises:
        ConfigError: a prompt is too long; its index is named.
    """
    own = sampling.temperature > 0  # a greedy completion needs no seed
    params = [
        sampling.model_copy(update={"seed": derive(seed, first_index + n)}) if own else sampling
        for n in range(len(prompts))
    ]
    return [
        SampledCompletion(
            ids=completion.ids,
            log_probs=[token.log_prob for token in completion.tokens],
            versions=[token.version for token in completion.tokens],
            finished=completion.finish_reason == "stop",
        )
        for completion in engine.generate(
            prompts, params, max_tokens=max_tokens, stop_ids=stop_ids, on_finished=on_finished
        )
    ]
