"""The interface every language model implements for training, sampling and scoring.

    x, positions = model.prepare(ids)            look-ups of embeddings and position tables; never compiled
    hidden       = model.trunk(x, positions)     matrix products; compiled in training                [B, T, d_model]
    logits       = model.logits(hidden)          [B, T, vocab]; objectives compute them in chunks instead

    state = model.new_state(batch, capacity)     decoding, any number of ids at a time: model(ids[:, :5], state=state)

All models share one state interface (`nn/mixer.py`), whether a layer keeps keys and values, a latent or a state of fixed
size. Trainer, engine and evaluation are therefore written once. `Transformer` implements this class.

Cost accounting lives on the model: `params`, `flops_per_token`, `kv_bytes_per_token`, `activation_bytes`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.nn.attention import MultiHeadAttention


class ModelState(Protocol):
    """The decoding state of all layers."""

    @property
    def length(self) -> int:
        """Return the number of positions processed so far."""
        ...

    @property
    def n_bytes(self) -> int:
        """Return the bytes of the state at full capacity."""
        ...


class LanguageModel(nn.Module, ABC):
    """A network from token ids to a hidden state and logits at every position (see the top of this file).

    Attributes:
        dtype: type of the activations.
        logit_softcap: c in c tanh(z / c), or None.
        max_positions: longest row, or None if unbounded.
        batch_independent: whether an output depends only on the earlier positions of the same row. It does not where experts
            have a capacity or choose their tokens (`nn/experts/router.py`), nor in masked diffusion.
        checkpointed_blocks: number of leading blocks whose activations are recomputed (`activation_checkpointing.py`).
        context_hint: capacity assumed for rows without a state, so that the rotary tables equal those of an engine with that
            capacity (`transformer.py`); None: the row's length.
        quantization: format of the matrices (`compression/quantize.py`), or None.
        own_matrices: names of direct parameters that are weight matrices, where they exist (`train/optim/decay_mask.py`).
        embedding_norm: norm of the embeddings, or an identity.
        memory: n-gram embedding, possibly quantized, or None.
        look_up, select_logits_step: of a table and a head that are split over ranks (`parallel/tensor_parallel.py`).
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
    own_matrices: tuple[str, ...] = ("head",)
    embedding_norm: nn.Module
    final_norm: nn.Module
    memory: Any
    look_up: Callable[[Tensor], Tensor] | None = None
    select_logits_step: Callable[..., Any] | None = None

    @property
    def eval_window(self) -> int:
        """Return the default row length, in positions, for scoring text."""
        return 512

    @property
    def declared_length(self) -> int:
        """Return the longest row, in positions, that the model's configuration is for; the default bound of every row."""
        return self.max_positions or 4096

    @property
    def ngram_context(self) -> int:
        """Return the number of ids before a position that its embedding reads."""
        return 0

    def layer_mixers(self) -> list[Any]:
        """Return each layer's `Mixer`; its `cache_spec` declares what an engine stores for the layer."""
        blocks: list[Any] = list(self.blocks)
        return [block.mixer for block in blocks]

    @property
    def attends_by_distance(self) -> bool:
        """Whether each layer is attention over keys and values that depends on distances, not on absolute positions."""
        return all(
            isinstance(mixer, MultiHeadAttention) and mixer.mask.block is None
            for mixer in self.layer_mixers()
        )

    @abstractmethod
    def prepare_joined(
        self, ids: Tensor, positions: Tensor, previous_ids: Tensor | None, capacity: int
    ) -> tuple[Tensor, Any]:
        """Look up ids of several rows, joined to one -> (embedded [1, N, d_model], positions for `trunk`).

        Args:
            ids, positions: [N].
            previous_ids: [N, ngram_context] ids before each position, -1 where there are none; None without such a context.
            capacity: longest row, in positions.
        """

    def n_checkpointed(self, state: Any) -> int:
        """Return how many blocks a forward checkpoints: none without gradients or while decoding.

        Recomputing a block would extend a decoding state twice.
        """
        return self.checkpointed_blocks if state is None and torch.is_grad_enabled() else 0

    @property
    def head_weight(self) -> Tensor:
        """Return the output matrix [vocab, d_model]; the embedding itself when tied."""
        if (product := self._modules.get("head_product")) is not None:  # of a quantized model
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
        """Look up ids [B, T] -> (embedded [B, T, d_model], positions for `trunk`). Arguments as in `forward`."""

    @abstractmethod
    def trunk(
        self,
        x: Tensor,
        positions: Any,
        segments: Tensor | None = None,
        state: Any = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """Compute normalized hidden states [B, T, d_model] in the compute type from the results of `prepare`."""

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: Any = None,
        routings: list[Any] | None = None,
    ) -> Tensor:
        """Compute hidden states [B, T, d_model] of ids [B, T]; `logits` makes logits of them.

        Args:
            positions: [T] or [B, T], default 0, 1, ... (continuing the state).
            segments: [B, T] document ids of a packed row; None when each row is one document; [B, T, T] bool: the pairs that
                attend.
            state: read and extended in place.
            routings: each mixture of experts appends its routing (`nn/experts`).
        """
        x, prepared = self.prepare(ids, positions, segments, state)
        return self.trunk(x, prepared, segments, state, routings)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute fp32 logits: [..., d_model] -> [..., vocab]."""
        project: Callable[[Tensor], Tensor] = self._modules.get("head_product") or self._project_to_vocab
        logits = project(hidden).float()
        cap = self.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _project_to_vocab(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head_weight.to(hidden.dtype))

    @abstractmethod
    def new_state(self, batch: int, capacity: int) -> ModelState:
        """Return an empty state for `batch` rows of up to `capacity` positions."""

    @abstractmethod
    def params(self) -> dict[str, int]:
        """Count parameters: total; active (used by a token); embedding (tables of ids, and the head)."""

    @abstractmethod
    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of the matrix products of one training token, forward + backward, in rows of `length`."""

    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Return the bytes that a row's state grows by with each further position."""

    @abstractmethod
    def activation_bytes(self, batch: int, length: int, device: str | None = None) -> int:
        """Return the bytes that the forward keeps for the backward, without logits and loss."""


def check_ids(ids: Tensor, vocab_size: int, segments: Tensor | None = None) -> None:
    """Check that ids are a non-empty matrix within the vocabulary. Values are checked on CPU only: a GPU would synchronize.

    Raises:
        ConfigError: ids are empty or outside the vocabulary, or segments have another shape.
    """
    if segments is not None and segments.shape[:2] != ids.shape:
        raise ConfigError(
            f"segments have the shape {list(segments.shape)}", expected=f"{list(ids.shape)}, as ids"
        )
    if ids.dim() != 2 or 0 in ids.shape:
        raise ConfigError(
            f"ids have the shape {list(ids.shape)}", expected="[rows, positions], both at least 1"
        )
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ConfigError(
                f"token id {low if low < 0 else high}",
                expected=f"0 to {vocab_size - 1}, vocab_size = {vocab_size}",
                do="encode with the tokenizer of the model",
            )


def saved_bytes(run: Callable[[], object], exclude: Iterable[Tensor]) -> int:
    """Return the bytes that autograd saves during `run()`, without the storages of `exclude` (the weights)."""
    excluded = {t.untyped_storage().data_ptr() for t in exclude}
    found: dict[int, Any] = {}  # keeps storages alive: the address of a freed one could be reused

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in excluded:
            found[storage.data_ptr()] = storage
        return t

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(int(storage.nbytes()) for storage in found.values())
