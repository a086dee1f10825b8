"""Generation without a KV cache: the slow reference, one sequence at a time, for benchmarks and tests of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from whorl.engine import Sampler, SamplerRow, SamplingParams, Token
from whorl.engine.sampling.forced_prefix import ForcedPrefix, SortedVocabulary
from whorl.models import LanguageModel


@torch.inference_mode()
def generate_without_cache(
    model: LanguageModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    banned_ids: Sequence[int] = (),
    forced_prefix: bytes = b"",
    token_bytes: Sequence[bytes] = (),
    top_log_probs: int = 0,
) -> Iterator[Token]:
    """Yield `max_tokens` tokens after `prompt` and `forced_prefix`; the whole sequence runs again for each.

    `sampling` has a seed. Tokens within the forced prefix are yielded and not counted.
    """
    vocab = model.config.vocab_size
    sampler, output = Sampler(vocab, banned_ids, model.embedding.device), list[int]()
    row = SamplerRow(sampling, sampling.seed or 0, prompt=prompt, output=output, top_log_probs=top_log_probs)
    matcher = ForcedPrefix(SortedVocabulary(token_bytes, vocab), forced_prefix) if forced_prefix else None
    remaining = max_tokens
    while remaining:
        row.allowed_mask = matcher.mask() if matcher else None
        ids = torch.tensor([[*prompt, *output]], device=model.embedding.device)
        (token,) = sampler(model.logits(model(ids)[:, -1]), [row])
        yield token
        output.append(token.id)
        row.n_drawn += 1
        forced = 0 if matcher is None or matcher.can_end else len(forced_prefix) - matcher.n_matched
        remaining -= not 0 < len(token_bytes[token.id]) <= forced if forced else 1
        if matcher:
            matcher.advance(token.id)
