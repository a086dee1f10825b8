"""Generation, token by token, with a state: `generate` streams one sequence, `complete` finishes many.

With the state (keys and values, or whatever a model keeps of the past) a new token costs one position's products; without
it the whole text is run again for every token (bench/engine_cache.py measures both). Token ids in, token ids out: text is
the caller's business.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from whorl.engine.sampler import sample
from whorl.engine.sampling import Sampling
from whorl.engine.step import DecodeStep
from whorl.models import Decoder, DecoderState, LanguageModel
from whorl.models.language import ModelState

N_ALTERNATIVES = 5


@dataclass(frozen=True)
class Token:
    """One sampled token. `log_prob`: under the distribution sampled from; `raw_log_prob`: under the model's own.

    `alternatives`: the model's likeliest ids with their own probabilities.
    """

    id: int
    log_prob: float
    raw_log_prob: float
    alternatives: tuple[tuple[int, float], ...]


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    sampling: Sampling,
    generator: torch.Generator,
    *,
    max_tokens: int,
    forbidden: Sequence[int] = (),
    required: bytes = b"",
    token_bytes: Sequence[bytes] = (),
    use_cache: bool = True,
) -> Iterator[Token]:
    """Streams up to `max_tokens` tokens that follow `prompt` (ids, at least one).

    forbidden: ids that are never produced (pad, bos). required: bytes that the output begins with (a healed prompt), in
    tokens of the model's choice, whose bytes `token_bytes` gives by id. Stopping at eos or at a text is left to the
    caller, who simply stops iterating. `use_cache=False` is the slow reference.
    """
    device = model.embedding.device
    ids = torch.tensor([list(prompt)], dtype=torch.int64, device=device)
    step, bias = decode_step(model) if use_cache else None, _bias(model, forbidden)
    state = model.new_state(1, len(prompt) + max_tokens) if use_cache else None
    fed = ids
    for _ in range(max_tokens):
        logits = _logits(model, step, fed, state) + bias
        if required:
            _require(logits[0], required, token_bytes)
        token, log_prob, raw = sample(logits, sampling, generator)
        chosen = int(token)
        best = raw[0].topk(min(N_ALTERNATIVES, logits.shape[-1]))
        alternatives = zip(best.indices.tolist(), best.values.exp().tolist(), strict=True)
        yield Token(chosen, float(log_prob), float(raw[0, chosen]), tuple(alternatives))
        required = required[len(token_bytes[chosen]) :] if required else required
        fed = token[:, None]
        if state is None:
            fed = ids = torch.cat([ids, fed], dim=1)


@torch.inference_mode()
def complete(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    *,
    max_tokens: int,
    eos_id: int,
    forbidden: Sequence[int] = (),
    required: Sequence[bytes] = (),
    token_bytes: Sequence[bytes] = (),
) -> list[list[int]]:
    """Completes many prompts, those of one length together; each ends before its eos or at `max_tokens`.

    required: for each prompt the bytes that its completion begins with, as in `generate`.
    """
    out: list[list[int]] = [[] for _ in prompts]
    by_length: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(number)
    step, bias = decode_step(model), _bias(model, forbidden)
    for length, members in sorted(by_length.items()):
        fed = torch.tensor(
            [list(prompts[n]) for n in members], dtype=torch.int64, device=model.embedding.device
        )
        state = model.new_state(len(members), length + max_tokens)
        alive = torch.ones(len(members), dtype=torch.bool)
        left = [required[n] if required else b"" for n in members]
        for _ in range(max_tokens):
            logits = _logits(model, step, fed, state) + bias
            for row, text in enumerate(left):
                if text:
                    _require(logits[row], text, token_bytes)
            token, _, _ = sample(logits, sampling, generator)
            left = [
                text[len(token_bytes[int(i)]) :] if text else text
                for text, i in zip(left, token, strict=True)
            ]
            alive &= token.cpu() != eos_id
            if not alive.any():
                break
            for row, n in enumerate(members):
                if alive[row]:
                    out[n].append(int(token[row]))
            fed = token[:, None]
    return out


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


def _bias(model: LanguageModel, forbidden: Sequence[int]) -> torch.Tensor:
    """[V]: what is added to logits, -inf for ids that must not come."""
    bias = torch.zeros(model.config.vocab_size, device=model.embedding.device)
    bias[list(forbidden)] = float("-inf")
    return bias


def _require(logits: torch.Tensor, text: bytes, token_bytes: Sequence[bytes]) -> None:
    """logits: [V], in place: only tokens that begin with `text`, or that `text` begins with, are left."""
    fits = [t.startswith(text) or (t != b"" and text.startswith(t)) for t in token_bytes]
    fits += [False] * (logits.shape[0] - len(fits))
    logits[~torch.tensor(fits, device=logits.device)] = float("-inf")
