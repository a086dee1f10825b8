"""Engines for models, and sampled completions: ids with the log-probability and weight version of each.

`open_engine` is the one place that makes an engine for a model and its tokenizer.

`sample_completions` serves all users: RL rollouts, evaluations, test-time scaling and on-policy distillation. Input and
output are ids. The stop id is part of a completion, because stopping is a choice of the policy.

The subtle point is seeds. A completion depends only on its own seed and index, not on the other requests or on
timing. So the same call returns the same completions on every engine, except for ties decided by rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling.grammar import GrammarCompiler
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError, DataError
from whorl.models import LanguageModel
from whorl.tokens.hf_tokenizer import AnyTokenizer
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.vocabulary import HealedPrompt
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


def open_engine(
    model: LanguageModel,
    sizes: EngineConfig | tuple[int, int],
    ids: AnyTokenizer | TokenEncoder,
    *,
    with_text: bool | None = True,
    grammar_ends: Collection[int] = (),
    **options: Any,
) -> Engine:
    """Return the engine of a model.

    Args:
        model: in its compute dtype, on its device.
        sizes: settings, or the sequences and positions of a batch (`EngineConfig.for_batch`).
        ids: a tokenizer; or an encoder, with which the ids that end a turn of its chat template are sampled.
        with_text: return the text of tokens; None: unless the tokenizer does not spell bytes. Without text a step takes less
            time, and stop strings are rejected.
        grammar_ends: ids that end a text, to compile grammars where llguidance is installed.
        options: further arguments of `Engine`.

    Raises:
        ConfigError: as `Engine`; the mask is a token of the tokenizer. DataError: the tokenizer does not spell bytes.
    """
    masked, known = model.config.masked, (ids.tokenizer if isinstance(ids, TokenEncoder) else ids).vocab_size
    if masked is not None and masked.mask_id < known:
        raise ConfigError(f"masked.mask_id is {masked.mask_id}, a token", expected=f"{known} or more")
    config = sizes if isinstance(sizes, EngineConfig) else EngineConfig.for_batch(*sizes)
    rows = model.config.vocab_size
    table: list[bytes] = []
    if with_text is not False:
        try:
            table = ids.text_bytes(rows)
        except DataError:  # WordPiece; such a model can score
            if with_text:
                raise
    ends = sorted(i for i in grammar_ends if i < len(table))
    if ends and find_spec("llguidance") is not None:  # the Python API works without it
        options["compile_grammar"] = GrammarCompiler(table, ends, len(table)).compile
    return Engine(model, config, token_bytes=table, banned_ids=ids.banned_ids(rows), **options)


def prompt_ids(model: LanguageModel, tokenizer: AnyTokenizer, text: str) -> HealedPrompt:
    """Return the ids to continue a text with; only a model of the next token can complete the last token of a prompt."""
    if model.config.masked is None:
        return tokenizer.heal_prompt(text)
    ids = tokenizer.encode_prompt(text)
    return HealedPrompt(ids, b"", len(ids))


def sample_completions(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    stop_ids: frozenset[int],
    seed: int,
) -> list[SampledCompletion]:
    """Return completions of `prompts`, in order.

    seed: each completion has its own seed, derived from its index.

    Raises:
        ConfigError: a prompt is too long; its index is named.
    """
    own = sampling.temperature > 0  # a greedy completion needs no seed
    params = [
        sampling.model_copy(update={"seed": derive(seed, n)}) if own else sampling
        for n in range(len(prompts))
    ]
    return [
        SampledCompletion(
            ids=completion.ids,
            log_probs=[token.log_prob for token in completion.tokens],
            versions=[token.version for token in completion.tokens],
            finished=completion.finish_reason == "stop",
        )
        for completion in engine.generate(prompts, params, max_tokens=max_tokens, stop_ids=stop_ids)
    ]
