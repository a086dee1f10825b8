"""Shared prompts: rows with the same prompt compute it once, with gradients.

    rows       prompt answer_1 | prompt answer_2 | ...        R rows of T positions
    shared     prompt | ... and answer_1 | answer_2 | ...     F rows of P positions, then R rows of A

The engine does this for sampling (prefix caching); this file does it for training. 16 prompts of 32 ids with 8
completions of 32 ids take 4,608 positions in place of 8,192, and longer prompts save more. The layers see one row of
F P + R A positions, as in an engine batch. The attention state (`nn/attention/paged.py`) holds only the keys and
values of the current layer, so the gradients of all completions flow into their prompt.

The subtle point is padding. Prompts are padded on the left, so a prompt's last position is adjacent to the first
position of its completions. Then relative distances (windows, slopes) and predecessors are those of a plain row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whorl.models import LanguageModel
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.paged import PagedState
from whorl.train.learner.update import MicroBatch

MAX_POSITIONS_FRACTION = 0.8  # of the positions of plain rows, at most: gathering keys costs time too


@dataclass(frozen=True)
class SharedPrefixBatch:
    """Layout of N = F P + R A positions.

    row, column: [N] source of each position's id (arbitrary for padding). prefix_index: [R] prompt of each row.
    prefix_length: [F] of the prompts. shape: (F, P, R, A). target_index: [M] positions of the hidden states of the
    targets in the loss, in row order. is_padded: whether a prompt is shorter than P.
    """

    row: Tensor
    column: Tensor
    prefix_index: Tensor
    prefix_length: Tensor
    shape: tuple[int, int, int, int]
    target_index: Tensor
    is_padded: bool


def find_shared_prefixes(batch: MicroBatch, multiple: int = 1) -> SharedPrefixBatch | None:
    """Return the layout of plain rows with one text each, or None where too little is shared.

    A row's prompt ends where its first target begins. multiple: of P and A, which padding reaches.
    """
    tokens, mask = batch["tokens"], batch["loss_mask"]
    n, width = tokens.shape
    row_length = (batch["sequence"] >= 0).sum(1)
    has_target = mask.any(1)
    prompt = torch.where(has_target, mask.int().argmax(1) + 1, row_length).clamp(
        min=1
    )  # positions up to the first target
    columns = torch.arange(width, device=tokens.device)
    prompts, prefix_index = torch.unique(
        tokens.masked_fill(columns >= prompt[:, None], -1), dim=0, return_inverse=True
    )
    length = (prompts >= 0).sum(1)
    f, p, a = len(prompts), int(length.max()), max(1, int((row_length - prompt).max()))
    if f * p + n * a > MAX_POSITIONS_FRACTION * n * width:
        return None
    p, a = (-(-positions // multiple) * multiple for positions in (p, a))
    first_row = torch.full((f,), n, device=tokens.device).scatter_reduce(
        0, prefix_index, torch.arange(n, device=tokens.device), "amin"
    )  # one row of each prompt
    prompt_column = (
        torch.arange(p, device=tokens.device) - (p - length)[:, None]
    )  # [F, P], below 0 for padding
    own_column = prompt[:, None] + torch.arange(a, device=tokens.device)  # [R, A]
    row = torch.cat(
        [
            first_row[:, None].expand(f, p).flatten(),
            torch.arange(n, device=tokens.device).repeat_interleave(a),
        ]
    )
    column = torch.cat([prompt_column.clamp(min=0).flatten(), own_column.clamp(max=width - 1).flatten()])
    r, t = mask.nonzero(as_tuple=True)
    offset = t - prompt[r]
    target_index = torch.where(offset < 0, prefix_index[r] * p + p + offset, f * p + r * a + offset)
    return SharedPrefixBatch(
        row, column, prefix_index, length, (f, p, n, a), target_index, int(length.min()) < p
    )


def supports_shared_prefix(model: LanguageModel) -> bool:
    """Return whether the layers allow it: attention over the whole past, or over a window of it."""
    return not model.checkpointed_blocks and model.batch_independent and model.attends_by_distance


def shared_prefix_hidden(
    model: LanguageModel, batch: MicroBatch, prefixes: SharedPrefixBatch, trunk: Callable[..., Tensor]
) -> Tensor:
    """Return [M, d_model] hidden states at the targets in the loss, with gradients. trunk: of the model."""
    tokens = batch["tokens"]
    state = _ModelState([_SharedPrefixLayer(prefixes) for _ in model.blocks])
    before: Tensor | None = None
    if model.ngram_context:
        back = prefixes.column[:, None] - torch.arange(model.ngram_context, 0, -1, device=tokens.device)
        before = tokens[prefixes.row[:, None], back.clamp(min=0)].masked_fill(back < 0, -1)
    x, where = model.prepare_joined(
        tokens[prefixes.row, prefixes.column],
        prefixes.column,
        before,
        model.context_hint or tokens.shape[1],
    )
    hidden = trunk(x, where, None, state)
    # Not hidden[0, target_index]: its gradient is summed in thread order where one position belongs to several rows.
    return hidden[0].index_select(0, prefixes.target_index)


@dataclass
class _ModelState:
    """State object for a model's `trunk`."""

    layers: list[_SharedPrefixLayer]
    length: int = 0


class _SharedPrefixLayer(PagedState):
    """One layer: prompts [F, P] and completions [R, A] apart, joined where a completion attends to its prompt."""

    def __init__(self, prefixes: SharedPrefixBatch) -> None:
        self.prefixes = prefixes
        self.length = 0  # unused here
        p = prefixes.shape[1]
        starts = p - prefixes.prefix_length
        self.padded: Tensor | None = None
        if prefixes.is_padded:
            self.padded = torch.arange(p, device=starts.device) < starts[:, None]  # [F, P]

    def _split(self, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        f, p, r, a = self.prefixes.shape
        shared, own = torch.split(x, [f * p, r * a], dim)
        return torch.unflatten(shared, dim, (f, p)), torch.unflatten(own, dim, (r, a))

    def predecessors(self, k: Tensor) -> Tensor:
        shared, own = self._split(k[0], 0)  # [F, P, KV, d], [R, A, KV, d]
        before = torch.cat([shared[:, :1], shared[:, :-1]], 1)
        if self.padded is not None:  # the first position of a prompt is its own predecessor
            begins = torch.cat([self.padded[:, 1:] != self.padded[:, :-1]], 1)
            begins = torch.nn.functional.pad(begins, (1, 0))
            before = torch.where(begins[:, :, None, None], shared, before)
        last = shared[:, -1:].index_select(0, self.prefixes.prefix_index)
        behind = torch.cat([last, own[:, :-1]], 1)
        return torch.cat([before.flatten(0, 1), behind.flatten(0, 1)])[None]

    def write(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = self._split_rows(k), self._split_rows(v)

    def _split_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return [1, H, N, d] as ([F, H, P, d], [R, H, A, d])."""
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
        visible = replace(mask, query_segments=segments, key_segments=segments)
        y = attend(leading, k.to(q.dtype), v.to(q.dtype), visible, *rest)  # [F, H, P, d]
        keys, values = (
            torch.cat([shared.index_select(0, self.prefixes.prefix_index), own_part], 2).to(q.dtype)
            for shared, own_part in ((k, k_own), (v, v_own))
        )
        if segments is None:
            visible = replace(mask, offset=p)
        else:
            of_row = segments.index_select(0, self.prefixes.prefix_index)
            new = of_row.new_zeros(r, a)
            visible = replace(mask, offset=p, query_segments=new, key_segments=torch.cat([of_row, new], 1))
        z = attend(own, keys, values, visible, *rest)  # [R, H, A, d]
        return torch.cat([y.transpose(0, 1).flatten(1, 2), z.transpose(0, 1).flatten(1, 2)], 1)[None]
