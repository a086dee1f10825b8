"""Generation with a model state: `generate` streams one sequence, `complete` finishes many.

With the state (for example keys and values) a new token costs one position's matrix products. Without it, the whole
sequence runs again for every token; bench/engine/kv_cache.py measures both. Token ids in, token ids out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from whorl.engine.request import Token
from whorl.engine.sampling.forced_prefix import ForcedPrefix, SortedVocabulary
from whorl.engine.sampling.sampler import Sampler, SamplerRow
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.step import DecodeStep
from whorl.models import Decoder, DecoderState, LanguageModel
from whorl.models.language_model import ModelState


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    generator: torch.Generator,
    *,
    max_tokens: int,
    banned_ids: Sequence[int] = (),
    forced_prefix: bytes = b"",
    token_bytes: Sequence[bytes] = (),
    top_log_probs: int = 0,
    use_cache: bool = True,
) -> Iterator[Token]:
    """Yield up to `max_tokens` tokens that follow `prompt` (ids, at least one).

    The seed is that of `sampling`, or else comes from `generator`. The caller stops iterating at eos or at a stop string.

    Args:
        banned_ids: ids that are never sampled (pad, bos).
        forced_prefix: bytes that the output starts with (a healed prompt), in any tokens.
        token_bytes: the bytes of each id, for `forced_prefix`.
        top_log_probs: number of alternatives returned with each token.
        use_cache: False recomputes the whole sequence for every token (the slow reference).
    """
    device = model.embedding.device
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    step = decode_step(model) if use_cache else None
    state = model.new_state(1, len(prompt) + max_tokens) if use_cache else None
    sampler = Sampler(model.config.vocab_size, banned_ids, device)
    output: list[int] = []
    row = SamplerRow(
        sampling, _seed(sampling, generator), prompt=prompt, output=output, top_log_probs=top_log_probs
    )
    matcher = _forced_prefixes([forced_prefix], token_bytes, model)[0]
    fed = ids
    for _ in range(max_tokens):
        row.allowed_mask = matcher.mask() if matcher else None
        (token,) = sampler(_logits(model, step, fed, state), [row])
        yield token
        output.append(token.id)
        row.n_drawn += 1
        if matcher:
            matcher.advance(token.id)
        fed = torch.tensor([[token.id]], device=device)
        if state is None:
            fed = ids = torch.cat([ids, fed], dim=1)


@torch.inference_mode()
def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    generator: torch.Generator,
    *,
    max_tokens: int,
    eos_id: int,
    banned_ids: Sequence[int] = (),
    forced_prefixes: Sequence[bytes] = (),
    token_bytes: Sequence[bytes] = (),
) -> list[list[int]]:
    """Return the completion ids of each prompt, up to but without eos, at most `max_tokens` each.

    Prompts of one length form a batch. Prompt n uses the seed of `sampling` (or of `generator`) plus n. forced_prefixes: one
    per prompt, as in `generate`.
    """
    out: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    step, device, seed = decode_step(model), model.embedding.device, _seed(sampling, generator)
    sampler = Sampler(model.config.vocab_size, banned_ids, device)
    matchers = _forced_prefixes(forced_prefixes or [b""] * len(prompts), token_bytes, model)
    for length, members in sorted(by_length.items()):
        fed = torch.tensor([list(prompts[n]) for n in members], dtype=torch.int64, device=device)
        state = model.new_state(len(members), length + max_tokens)
        rows = [SamplerRow(sampling, seed + n, prompt=prompts[n], output=out[n]) for n in members]
        alive = [True] * len(members)
        for _ in range(max_tokens):
            for row, n in zip(rows, members, strict=True):
                matcher = matchers[n]
                row.allowed_mask = matcher.mask() if matcher else None
            tokens = [token.id for token in sampler(_logits(model, step, fed, state), rows)]
            alive = [still and token != eos_id for still, token in zip(alive, tokens, strict=True)]
            if not any(alive):
                break
            for n, row, token, still in zip(members, rows, tokens, alive, strict=True):
                row.n_drawn += 1
                if still:
                    out[n].append(token)
                    matcher = matchers[n]
                    if matcher:
                        matcher.advance(token)
            fed = torch.tensor(tokens, device=device)[:, None]
    return out


def _seed(sampling: SamplingParams, generator: torch.Generator) -> int:
    if sampling.seed is not None:
        return sampling.seed
    return int(torch.randint(1 << 62, (1,), generator=generator, device=generator.device))


def _forced_prefixes(
    texts: Sequence[bytes], token_bytes: Sequence[bytes], model: LanguageModel
) -> list[ForcedPrefix | None]:
    """Return one constraint per prefix, None for an empty prefix."""
    if not any(texts):
        return [None] * len(texts)
    vocabulary = SortedVocabulary(token_bytes, model.config.vocab_size)
    return [ForcedPrefix(vocabulary, text) if text else None for text in texts]


def decode_step(model: LanguageModel) -> DecodeStep | None:
    """Return the fused decode step of a `Decoder`, or None: other models decode through their forward."""
    return DecodeStep(model) if isinstance(model, Decoder) else None


def _logits(
    model: LanguageModel, step: DecodeStep | None, fed: torch.Tensor, state: ModelState | None
) -> torch.Tensor:
    """Logits [B, V] after `fed` [B, T]: a prompt, the whole sequence, or with a state the newest token alone."""
    if step is not None and isinstance(state, DecoderState) and fed.shape[1] == 1:
        return step(fed, state)
    return model.logits(model(fed, state=state)[:, -1])
