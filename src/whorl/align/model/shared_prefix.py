"""Families: rows that begin alike are read once up to where they part. The K answers to a task share its prompt.

    rows      prompt answer_1 | prompt answer_2 | ...        R rows of T positions
    families  prompt | ... and answer_1 | answer_2 | ...     F rows of P positions, R rows of A, one behind another

Sampling has always done so (`engine/`: a prompt is read once, its answers find it in the cache). Here it is done with
gradients: 16 prompts of 32 ids with 8 answers of 32 are 4,608 positions in place of 8,192, and the longer the prompts the
more is saved. To the layers it is one row of F P + R A positions, as an engine's batch is: what differs is asked of the
state (`nn/attention/paged.py`), which here keeps nothing but the keys and values of the layer under way, so that gradients
of all answers flow into the prompt that they read.

The subtle part is padding: on the left of prompts, so that a prompt's last position lies beside its answers' first. Then
distances are those of the row (windows, slopes), and who stood before is who stands before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whorl.models import Decoder, LanguageModel, Transformer
from whorl.models.transformer_config import AttentionConfig
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedState
from whorl.train.learner.update import MicroBatch

MAX_POSITIONS_FRACTION = 0.8  # of the positions at most: moving keys about costs something too


@dataclass(frozen=True)
class SharedPrefixBatch:
    """Where everything lies: N = F P + R A positions.

    row, column: [N] where each position's id stands among the rows (padding: anywhere); family: [R] of each row; length:
    [F] of the prompts; own: [R] positions of each row behind its prompt; shape: (F, P, R, A); at: [M] where the hidden
    states of the targets that count are, row by row.
    """

    row: Tensor
    column: Tensor
    prefix_index: Tensor
    prefix_length: Tensor
    shape: tuple[int, int, int, int]
    target_index: Tensor


def find_shared_prefixes(batch: MicroBatch) -> SharedPrefixBatch | None:
    """Of plain rows, one text each; None where too little is shared. A row's prompt ends where its first target begins."""
    tokens, mask = batch["tokens"], batch["loss_mask"]
    n, width = tokens.shape
    used = (batch["sequence"] >= 0).sum(1)
    some = mask.any(1)
    prompt = torch.where(some, mask.int().argmax(1) + 1, used).clamp(
        min=1
    )  # positions up to the first target's
    places = torch.arange(width, device=tokens.device)
    heads, family = torch.unique(
        tokens.masked_fill(places >= prompt[:, None], -1), dim=0, return_inverse=True
    )
    length = (heads >= 0).sum(1)
    f, p, a = len(heads), int(length.max()), max(1, int((used - prompt).max()))
    if f * p + n * a > MAX_POSITIONS_FRACTION * n * width:
        return None
    first = torch.full((f,), n, device=tokens.device).scatter_reduce(
        0, family, torch.arange(n, device=tokens.device), "amin"
    )  # a row of each family
    lead = torch.arange(p, device=tokens.device) - (p - length)[:, None]  # [F, P], below 0 for padding
    own = prompt[:, None] + torch.arange(a, device=tokens.device)  # [R, A]
    row = torch.cat(
        [first[:, None].expand(f, p).flatten(), torch.arange(n, device=tokens.device).repeat_interleave(a)]
    )
    column = torch.cat([lead.clamp(min=0).flatten(), own.clamp(max=width - 1).flatten()])
    r, t = mask.nonzero(as_tuple=True)
    behind = t - prompt[r]
    at = torch.where(behind < 0, family[r] * p + p + behind, f * p + r * a + behind)
    return SharedPrefixBatch(row, column, family, length, (f, p, n, a), at)


def supports_shared_prefix(model: LanguageModel) -> bool:
    """Whether the model's layers are such that rows can part: attention over all of the past, or a window of it."""
    if model.checkpointed_blocks or not model.batch_independent:
        return False
    if isinstance(model, Decoder):
        return True
    return isinstance(model, Transformer) and all(
        isinstance(mixer, AttentionConfig) and mixer.block is None for mixer in model.config.layer_mixers()
    )


def shared_prefix_hidden(model: LanguageModel, batch: MicroBatch, prefixes: SharedPrefixBatch) -> Tensor:
    """[M, d_model] hidden states at the targets that count; with gradients."""
    tokens = batch["tokens"]
    ids, positions = tokens[prefixes.row, prefixes.column][None], prefixes.column[None]
    state = _ModelState([_SharedPrefixLayer(prefixes) for _ in model.blocks])
    where: Any = positions
    if isinstance(model, Decoder):
        where = model.rotary_for(model.context_hint or tokens.shape[1]).tables_at(positions)
        reach = max(model.config.ngram_orders, default=1) - 1
        if reach:  # each position with the ids before it, as a row of its own
            back = prefixes.column[:, None] - torch.arange(reach, 0, -1, device=tokens.device)
            before = tokens[prefixes.row[:, None], back.clamp(min=0)]
            state.last_ids = before.masked_fill(back < 0, -1)
            x = model.embed(ids[0][:, None], None, state).transpose(0, 1)  # type: ignore[arg-type]
        else:
            x = model.embed(ids)
    else:
        x = model.embed(ids, positions)  # type: ignore[operator]
    hidden: Tensor = model.trunk(x, where, None, state)
    # Not hidden[0, found.at]: its gradient is summed in the order of threads, where a place stands for several rows.
    return hidden[0].index_select(0, prefixes.target_index)


@dataclass
class _ModelState:
    """What a model's `trunk` is given as its state."""

    layers: list[_SharedPrefixLayer]
    last_ids: Tensor | None = None
    length: int = 0


class _SharedPrefixLayer(PagedState):
    """Of one layer: prompts [F, P] and answers [R, A] apart, and put together where an answer looks back."""

    def __init__(self, prefixes: SharedPrefixBatch) -> None:
        self.prefixes = prefixes
        self.length = 0  # of no meaning here
        p = prefixes.shape[1]
        starts = p - prefixes.prefix_length
        self.padded: Tensor | None = None
        if int(starts.max()):
            self.padded = torch.arange(p, device=starts.device) < starts[:, None]  # [F, P]

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        f, p, r, a = self.prefixes.shape
        shared, own = torch.split(x, [f * p, r * a], dim)
        return torch.unflatten(shared, dim, (f, p)), torch.unflatten(own, dim, (r, a))

    def predecessors(self, k: Tensor) -> Tensor:
        shared, own = self._split(k[0], 0)  # [F, P, KV, d], [R, A, KV, d]
        before = torch.cat([shared[:, :1], shared[:, :-1]], 1)
        if self.padded is not None:  # the first of a prompt has none before it: itself
            begins = torch.cat([self.padded[:, 1:] != self.padded[:, :-1]], 1)
            begins = torch.nn.functional.pad(begins, (1, 0))
            before = torch.where(begins[:, :, None, None], shared, before)
        last = shared[:, -1:].index_select(0, self.prefixes.prefix_index)
        behind = torch.cat([last, own[:, :-1]], 1)
        return torch.cat([before.flatten(0, 1), behind.flatten(0, 1)])[None]

    def write(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = self._split_rows(k), self._split_rows(v)

    def _split_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[1, H, N, d] -> ([F, H, P, d], [R, H, A, d])."""
        shared, own = self._split(x[0], 1)
        return shared.transpose(0, 1), own.transpose(0, 1)

    def attend(
        self,
        q: Tensor,
        mask: Mask,
        scale: float | None,
        bias: Tensor | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        backend: str = "auto",
    ) -> Tensor:
        _, p, r, a = self.prefixes.shape
        leading, own = self._split_rows(q)
        (k, k_own), (v, v_own) = self.k, self.v
        rest = scale, bias, softcap, sink, backend
        segments = None if self.padded is None else self.padded.int()
        seen = replace(mask, query_segments=segments, key_segments=segments)
        y = attend(leading, k.to(q.dtype), v.to(q.dtype), seen, *rest)  # [F, H, P, d]
        keys, values = (
            torch.cat([shared.index_select(0, self.prefixes.prefix_index), mine], 2).to(q.dtype)
            for shared, mine in ((k, k_own), (v, v_own))
        )
        if segments is None:
            seen = replace(mask, offset=p)
        else:
            of_row = segments.index_select(0, self.prefixes.prefix_index)
            new = of_row.new_zeros(r, a)
            seen = replace(mask, offset=p, query_segments=new, key_segments=torch.cat([of_row, new], 1))
        z = attend(own, keys, values, seen, *rest)  # [R, H, A, d]
        return torch.cat([y.transpose(0, 1).flatten(1, 2), z.transpose(0, 1).flatten(1, 2)], 1)[None]
