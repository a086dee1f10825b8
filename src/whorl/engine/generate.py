"""Generation, token by token, with a state: `generate` streams one sequence, `complete` finishes many.

With the state (keys and values, or whatever a model keeps of the past) a new token costs one position's products; without
it the whole text is run again for every token (bench/engine/kv_cache.py measures both). Token ids in, token ids out: text is
the caller's business.
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
    """Streams up to `max_tokens` tokens that follow `prompt` (ids, at least one).

    The seed is that of `sampling`; where it has none, `generator` gives one. forbidden: ids that are never produced (pad,
    bos). required: bytes that the output begins with (a healed prompt), in tokens of the model's choice, whose bytes
    `token_bytes` gives by id. top_log_probs: alternatives told with each token. Stopping at eos or at a text is left to the
    caller, who simply stops iterating. `use_cache=False` is the slow reference.
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
    """Completes many prompts, those of one length together; each ends before its eos or at `max_tokens`.

    The prompt of number n draws with the seed of `sampling` (or of `generator`) + n. required: for each prompt the bytes
    that its completion begins with, as in `generate`.
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
    """One for each text, None where nothing is required."""
    if not any(texts):
        return [None] * len(texts)
    vocabulary = SortedVocabulary(token_bytes, model.config.vocab_size)
    return [ForcedPrefix(vocabulary, text) if text else None for text in texts]


def decode_step(model: LanguageModel) -> DecodeStep | None:
    """The flattened step of our own decoder; every other model decodes by its forward."""
    return DecodeStep(model) if isinstance(model, Decoder) else None


def _logits(
    model: LanguageModel, step: DecodeStep | None, fed: torch.Tensor, state: ModelState | None
) -> torch.Tensor:
    """[B, V] after `fed` [B, T]: a prompt, the whole text so far, or with a state the newest token alone."""
    if step is not None and isinstance(state, DecoderState) and fed.shape[1] == 1:
        return step(fed, state)
    return model.logits(model(fed, state=state)[:, -1])
