"""Sampling of masked diffusion models: a block of masks is computed again and again, and its tokens are revealed.

The drafts of a sequence are its canvas: the masks that complete its block, or with a model without blocks `max_tokens` masks
and then the text behind the gap (infilling). A step computes the positions behind the last complete block, and a token is
sampled at every masked one. The tokens of the most certain positions are revealed; the others stay masked. A settled block
becomes a part of the sequence, and its keys and values enter the cache with the first step of the next block.

Certainty is the highest probability of a position ("confidence"; MaskGIT, arXiv:2202.04200; LLaDA, arXiv:2502.09992), or its
negative entropy ("entropy"). It is a property of the model's distribution, not of the token that was drawn. So a token
follows the model's conditional distribution, in any order, and with one token per step the text has the
probability that the network gives it in this order. Several tokens of a step are drawn as if they were independent.

The random number of a position depends on its place in the text alone, so a text does not depend on other requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.engine.config import EngineConfig
from whorl.engine.request import Request, Token
from whorl.engine.sampling.sampler import SamplerRow
from whorl.engine.sequence import Sequence
from whorl.errors import ConfigError
from whorl.models.transformer_config import MaskedConfig

WHOLE = 1 << 30  # positions of the block of a model without blocks


def canvas_config(config: EngineConfig, masked: MaskedConfig | None, drafts: bool) -> EngineConfig:
    """Return settings with pages of whole blocks and steps that hold a canvas. drafts: the engine has a proposer.

    Raises:
        ConfigError: drafts, which continue a text from left to right.
    """
    if masked is None:
        return config
    if drafts:
        raise ConfigError("drafts are set for a masked diffusion model", expected="no speculation")
    page = math.lcm(config.block_size, masked.block or 1)
    longest = 2 * masked.block if masked.block else config.max_model_len
    tokens = config.kv_cache_tokens
    sizes = {
        "block_size": page, "max_num_batched_tokens": max(config.max_num_batched_tokens, longest), "decode_burst": 1,
        "max_model_len": -(-config.max_model_len // (masked.block or 1)) * (masked.block or 1),
        "kv_cache_tokens": None if tokens is None else -(-tokens // page) * page,
    }  # fmt: skip
    return config.model_copy(update=sizes)


def check_request(request: Request, masked: MaskedConfig | None) -> None:
    """Raise ConfigError for a field that belongs to the other kind of model; the message names it."""
    s, block = request.sampling, masked.block if masked is not None else None
    masked_only: dict[str, object] = {
        "steps": s.steps,
        "reveal": s.reveal != "confidence",
        "suffix": request.suffix,
    }
    causal_only: dict[str, object] = {
        "grammar": request.grammar, "forced_prefix": request.forced_prefix, "score_from": request.score_from,
        "prompt_log_probs": request.prompt_log_probs, "min_tokens": request.min_tokens,
        "repetition_penalty": s.repetition_penalty != 1,
        "presence_penalty": s.presence_penalty, "frequency_penalty": s.frequency_penalty,
        "suffix": block and request.suffix,
    }  # fmt: skip
    found = masked_only if masked is None else causal_only
    for name in (name for name, value in found.items() if value):
        reason = "a masked diffusion model" if masked is None else "a model of the next token"
        if name == "suffix" and block:
            reason = f"a model without blocks; this one has blocks of {block}"
        error = ConfigError(f"{name} is set, which needs {reason}", do=f"leave out {name}")
        error.field = name
        raise error


def open_canvases(sequences: Iterable[Sequence], mask_id: int, max_positions: int) -> None:
    """Give each sequence whose last block is reached and that has no canvas a new one."""
    for sequence in sequences:
        if sequence.drafts or not sequence.decoding:
            continue
        suffix = list(sequence.request.suffix)
        room = min(sequence.request.max_tokens, max_positions - len(sequence.ids) - len(suffix))
        n = room if sequence.block == WHOLE else sequence.block - len(sequence.ids) % sequence.block
        sequence.drafts, sequence.revealed = [mask_id] * n + suffix, [None] * n
        sequence.reveal_per_step = -(-n // min(n, sequence.request.sampling.steps or n))


def certainties(logits: Tensor, rows: SequenceABC[SamplerRow], banned: NDArray[np.bool_]) -> list[float]:
    """Return the certainty of each row of logits [W, V] fp32. banned: [V] ids that are never sampled."""
    log_probs = logits.masked_fill(torch.from_numpy(banned).to(logits.device), -torch.inf).log_softmax(-1)
    confidence, entropy = log_probs.amax(-1), torch.special.entr(log_probs.exp()).sum(-1)
    by_entropy = torch.tensor([row.sampling.reveal == "entropy" for row in rows], device=logits.device)
    found: list[float] = torch.where(by_entropy.bool(), -entropy, confidence).tolist()
    return found


def reveal(sequence: Sequence, tokens: list[Token | None], certainty: list[float]) -> list[Token | None]:
    """Reveal the most certain tokens of the masked positions; return all tokens of the block if it is settled.

    The first of equally certain positions comes first. A position without a valid token ends the sequence.
    """
    if None in tokens:
        return [None]
    masked = sequence.masked_positions
    order = sorted(range(len(masked)), key=lambda n: (-certainty[n], n))
    for n in order[: sequence.reveal_per_step]:
        if (token := tokens[n]) is not None:
            at = masked[n] - len(sequence.ids)
            sequence.revealed[at], sequence.drafts[at] = token, token.id
    if None in sequence.revealed:
        return []
    sequence.drafts = sequence.drafts[: len(sequence.revealed)]
    return sequence.revealed
