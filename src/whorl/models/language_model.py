"""What every language model of the house is to those who train it, sample from it and score with it.

    x, where = model.prepare(ids)                look-ups: ids become vectors, positions become tables. Never compiled
    hidden   = model.trunk(x, where)             products: what `torch.compile` sees in training      [B, T, d_model]
    logits   = model.logits(hidden)              [B, T, vocab]; the objective never asks for all of them at once

    state = model.new_state(batch, capacity)     and then the same in any pieces: model(ids[:, :5], state=state) ...

One state interface for all: whether a layer keeps keys and values, a latent or a state of fixed size is its own business
(`nn/mixer.py`), and so trainer, engine and evaluation are written once. `Decoder` and `Transformer` are such models.

The cost of a model is a question to the model: `params`, `flops_per_token`, `kv_bytes_per_token`, `activation_bytes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError


class ModelState(Protocol):
    """What decoding keeps of the past, all layers together."""

    @property
    def length(self) -> int:
        """Positions taken in so far."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes of all of it, of the whole capacity."""
        ...


class LanguageModel(nn.Module, ABC):
    """Token ids in, a hidden state and logits for every position out (see the top of this file).

    dtype: the type that activations are computed in; logit_softcap: c in c tanh(z / c), or None; longest: positions that a
    row may have, or None where nothing bounds them; independent: whether what a position says depends on nothing but the
    positions before it in its row (not so where experts have a capacity, or choose: `nn/experts/router.py`); remade: blocks,
    from the first, whose activations the backward makes anew (`recompute.py`); scheme: in which bits the matrices are kept
    (`quantised.py`), or None; room: positions that rows without a state are read as having room for, so that they are
    read as an engine with that room reads them (`decoder.py`), None: as many as they have.
    """

    config: Any
    dtype: torch.dtype
    embedding: nn.Parameter  # [vocab, d_model]
    head: nn.Parameter | None
    blocks: nn.ModuleList
    logit_softcap: float | None = None
    max_positions: int | None = None
    batch_independent: bool = True
    checkpointed_blocks: int = 0
    context_hint: int | None = None
    quantization: Any = None

    @property
    def eval_window(self) -> int:
        """Positions of a row that text is scored in, unless somebody asks for others."""
        return 512

    def n_checkpointed(self, state: Any) -> int:
        """Of a forward: none without gradients, and none while decoding, which would extend its state twice."""
        return self.checkpointed_blocks if state is None and torch.is_grad_enabled() else 0

    @property
    def head_weight(self) -> Tensor:
        """[vocab, d_model]: the output matrix (the embedding itself when tied)."""
        if (product := self._modules.get("head_product")) is not None:  # of a quantised model
            return cast(Tensor, product.weight)
        return self.embedding if self.head is None else self.head

    @abstractmethod
    def prepare(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
    ) -> tuple[Tensor, Any]:
        """ids [B, T] -> (embedded [B, T, d_model], what `trunk` must know of their positions). Arguments as in `forward`."""

    @abstractmethod
    def trunk(
        self,
        x: Tensor,
        positions: Any,
        segments: Tensor | None = None,
        state: Any = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """What `prepare` made -> normalised hidden states [B, T, d_model] in the compute type."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """ids [B, T] -> hidden states [B, T, d_model].

        positions: [T] or [B, T], default 0, 1, ... (after what the state holds); segments: [B, T] ids of the
        documents in a packed row, or None when each row is one document; state: read and extended in place; records:
        each mixture of experts appends what it did (`nn/experts`).
        """
        x, where = self.prepare(ids, positions, segments, state)
        return self.trunk(x, where, segments, state, routings)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d_model] -> [..., vocab] in fp32."""
        made: Callable[[Tensor], Tensor] = self._modules.get("head_product") or self._project_to_vocab
        logits = made(hidden).float()
        cap = self.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _project_to_vocab(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    @abstractmethod
    def new_state(self, batch: int, capacity: int) -> ModelState:
        """An empty state for `batch` rows of up to `capacity` positions."""

    @abstractmethod
    def params(self) -> dict[str, int]:
        """Parameters: total; active (those that a token meets); embedding (tables of ids, and the head)."""

    @abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Floating-point operations of the products of one training token, forward + backward, in rows of `length`."""

    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes that a row's state grows by with each further position."""

    @abstractmethod
    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Bytes that the forward pass keeps for the backward one; logits and loss left out."""


def check_ids(ids: Tensor, vocab_size: int, segments: Tensor | None = None) -> None:
    """That there are ids, and that they are of this vocabulary (looked at on a CPU only: a GPU would have to wait).

    Raises:
        ConfigError: there are none, or one is outside, or segments have another shape.
    """
    if segments is not None and segments.shape != ids.shape:
        raise ConfigError(
            f"segments have the shape {list(segments.shape)}", expected=f"{list(ids.shape)}, as ids"
        )
    if ids.dim() != 2 or 0 in ids.shape:
        raise ConfigError(
            f"ids have the shape {list(ids.shape)}", expected="[rows, positions], one at least of both"
        )
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ConfigError(
                f"token id {low if low < 0 else high}",
                expected=f"0 to {vocab_size - 1}, vocab_size = {vocab_size}",
                do="encode with the tokenizer that the model was trained with",
            )


def saved_bytes(run: Callable[[], object], exclude: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps of `run()`, storages of `own` (the weights) left out."""
    known = {t.untyped_storage().data_ptr() for t in exclude}
    found: dict[int, Any] = {}  # the storages themselves: freed ones would lend their address to others

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(int(storage.nbytes()) for storage in found.values())
