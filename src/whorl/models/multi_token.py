"""Multi-token prediction: heads that read one hidden state and predict the tokens at t + 1, t + 2, ..., t + n.

    h^i = norm(block_i(h))                                         [B, T, d_model], i = 1 .. n
    p(x_(t+i) | x_1 .. x_t) = softmax(W h^i_t)                     W: the output matrix, shared by all heads
    loss = - sum_t sum_i log p(x_(t+i) | x_1 .. x_t)

(Gloeckle et al. 2024, arXiv:2404.19737, eq. 2 and figure 1.) At inference one pass of the trunk gives a draft of n tokens,
which speculative decoding verifies. Each block is a causal transformer layer that starts as the identity.

The paper runs the heads one after the other, so that the logits of only one exist at a time (section 2). Here
`next_token` never holds more than a chunk of any logits.

Subtle point: valid targets. Position t may learn x_(t+i) only if x_(t+i) is in the same row and document and is a target
itself (`mask`: no prompt, no padding). Document boundaries are counted instead of comparing segment ids, since a row may
use an id twice.

On disk the heads are two files in the folder of their model: multi_token.json and multi_token.safetensors.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import CheckpointError, ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.encoder import EncoderBlock
from whorl.nn.attention import KeyValueState
from whorl.nn.compiler import meta_device
from whorl.nn.gpu.dispatch import logits_step
from whorl.nn.linear import Linear
from whorl.nn.mlp import Activation
from whorl.nn.norm import RMSNorm
from whorl.nn.rotary import Rotary
from whorl.objectives.next_token import Loss, next_token
from whorl.store.files import load_json, require_regular

CONFIG_FILE, WEIGHTS_FILE = "multi_token.json", "multi_token.safetensors"


class MultiTokenPrediction(ProfiledTextModule):
    """n heads over a trunk's hidden states (see the top of this file).

    Args:
        d_model: width of the hidden states. n: number of predicted tokens. n_heads: attention heads of each block.
        mlp_hidden: 4 d_model by default. dtype: of the activations, for the rotary tables.

    Raises:
        ConfigError: n is below 1, or d_model is no multiple of 2 n_heads.
    """

    def __init__(
        self,
        d_model: int,
        n: int,
        n_heads: int,
        *,
        mlp_hidden: int | None = None,
        mlp: Activation = "gelu",
        rope_base: float = 10_000.0,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if n < 1:
            raise ConfigError(f"n is {n}", expected="at least 1 token to predict")
        if n_heads < 1 or d_model % (2 * n_heads):
            raise ConfigError(
                f"n_heads is {n_heads} and d_model is {d_model}",
                expected="d_model a multiple of 2 n_heads: rotary embedding rotates pairs of features",
            )
        self.n, self.d_model, self.dtype = n, d_model, dtype
        rotary = Rotary(d_model // n_heads, rope_base, dtype)
        hidden = mlp_hidden or 4 * d_model
        self.shape = {
            "d_model": d_model, "n": n, "n_heads": n_heads, "mlp_hidden": hidden, "mlp": mlp, "rope_base": rope_base
        }  # fmt: skip
        self.blocks = nn.ModuleList(
            EncoderBlock(
                d_model, n_heads, hidden, mlp, causal=True, rotary=rotary, bias=False, generator=generator
            )
            for _ in range(n)
        )
        self.norms = nn.ModuleList(RMSNorm(d_model) for _ in range(n))

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return hidden states of `size` positions. The output matrix is the trunk's and is counted there."""
        return (torch.zeros(batch, size, self.d_model, dtype=self.dtype, device=device),)

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of all heads' states per token."""
        states = [
            sum(s.n_bytes for s in self.new_state(1, n, dtype=self.dtype, device="meta")) for n in (1, 2)
        ]
        return states[1] - states[0]

    def head(
        self,
        offset: int,
        hidden: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        states: list[KeyValueState] | None = None,
    ) -> Tensor:
        """Compute the hidden states that predict the token `offset` (1 .. n) positions ahead; hidden: [B, T, d_model].

        Args:
            positions: [T] or [B, T], default 0, 1, ...
            segments: [B, T] documents of a packed row, or None.
            states: from `new_state`; the state of this head is read and extended.

        Returns:
            [B, T, d_model].

        Raises:
            ConfigError: offset is not in 1 .. n.
        """
        if not 1 <= offset <= self.n:
            raise ConfigError(f"offset is {offset}", expected=f"from 1 to n = {self.n}")
        block, norm = self.blocks[offset - 1], self.norms[offset - 1]
        state = None if states is None else states[offset - 1]
        out: Tensor = norm(block(hidden, positions=positions, segments=segments, state=state))
        return out

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        states: list[KeyValueState] | None = None,
    ) -> list[Tensor]:
        """Compute all heads: hidden [B, T, d_model] -> n tensors of its shape. Arguments as in `head`."""
        return [self.head(i, hidden, positions, segments, states) for i in range(1, self.n + 1)]

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> list[KeyValueState]:
        """Return the state for drafting: for each head, keys and values of up to `capacity` positions."""
        attentions = [block.attention for block in self.blocks if isinstance(block, EncoderBlock)]
        return [a.new_state(batch, capacity, dtype=dtype, device=device) for a in attentions]

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        output: Tensor,
        positions: Tensor | None = None,
        states: list[KeyValueState] | None = None,
        first: int = 1,
    ) -> Tensor:
        """Return the most likely tokens `first` .. n positions after the last one, one from each head.

        Args:
            hidden: [B, T, d_model] of all positions so far; with `states`, of the positions that they do not hold yet.
            output: [vocab, d_model].

        Returns:
            [B, n - first + 1] ids. The heads predict independently: no id depends on another.
        """
        offsets = range(first, self.n + 1)
        newest = torch.stack(
            [self.head(offset, hidden, positions, None, states)[:, -1] for offset in offsets], dim=1
        )  # [B, n - first + 1, d_model]
        return F.linear(newest, output.to(newest.dtype)).float().argmax(dim=-1)


def save_multi_token(heads: MultiTokenPrediction, folder: Path) -> None:
    """Write the heads into the folder of their model."""
    (folder / CONFIG_FILE).write_text(json.dumps(heads.shape, indent=1) + "\n")
    save_file(
        {n: p.detach().cpu().contiguous().clone() for n, p in heads.named_parameters()}, folder / WEIGHTS_FILE
    )


def load_multi_token(
    folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> MultiTokenPrediction:
    """Return the heads in the folder of a model; weights of matrix products are cast to `dtype`.

    Raises:
        CheckpointError: there are none, a file is damaged, or a tensor has another shape.
    """
    try:
        shape = load_json(folder / CONFIG_FILE)
        weights = load_file(require_regular(folder / WEIGHTS_FILE))
        with meta_device():  # without memory until the shapes are those of the file
            MultiTokenPrediction(**shape, dtype=dtype).load_state_dict(weights)
        heads = MultiTokenPrediction(**shape, dtype=dtype)
        heads.load_state_dict(weights)
    except (OSError, ValueError, TypeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read multi-token heads from {folder}: {error}",
            expected=f"{CONFIG_FILE} and {WEIGHTS_FILE}",
            do="use a model of the step `multi_token`",
        ) from error
    for layer in heads.modules():
        if isinstance(layer, Linear):
            layer.weight.data = layer.weight.data.to(dtype)
    return heads.to(device).requires_grad_(False).eval()


def shift_targets(
    targets: Tensor, mask: Tensor, segments: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Return targets and mask of the head `offset` (1 .. n): both [B, T].

    Args:
        targets: [B, T], the next token of each position: targets[:, t] is the token at t + 1.
        mask: [B, T] bool, True where that token is a target; made with the tokens.
        segments: [B, T] documents of the positions, or None.
    """
    shift = min(offset - 1, targets.shape[1])
    if shift == 0:
        return targets, mask
    # Position t's target is at t + shift, so t must be in that position's document. `mask` ensures the same for its target.
    shifted, keep = (F.pad(t[:, shift:], (0, shift)) for t in (targets, mask))
    if segments is not None:
        boundaries = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)).cumsum(dim=1)
        keep = keep & (boundaries == F.pad(boundaries[:, shift:], (0, shift), value=-1))
    return shifted, keep


def multi_token_loss(
    heads: MultiTokenPrediction,
    hidden: Tensor,
    output: Tensor,
    targets: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> Loss:
    """Sum the cross-entropies of all heads over positions and heads, in nats.

    Args:
        hidden: [B, T, d_model], of the trunk. output: [vocab, d_model], fp32, the same for all heads.
        targets, mask, segments: as in `shift_targets`. positions: as in `MultiTokenPrediction.head`.

    Returns:
        Loss: `total` [] fp32, `count` [] = predictions of all heads, so that the mean does not grow with n. Metrics
        `nll_1` .. `nll_n` and `count_1` .. `count_n` are sums over the positions of each head; later heads have fewer.

    Raises:
        ConfigError: shapes do not fit.
    """
    for name, tensor in (("targets", targets), ("mask", mask), ("segments", segments)):
        if tensor is not None and tensor.shape != hidden.shape[:2]:
            raise ConfigError(f"{name} is {list(tensor.shape)}", expected=f"{list(hidden.shape[:2])}")
    total, count = hidden.new_zeros((), dtype=torch.float32), torch.zeros((), device=hidden.device)
    metrics: dict[str, Tensor] = {}
    for offset in range(1, heads.n + 1):
        shifted, keep = shift_targets(targets, mask, segments, offset)
        h = heads.head(offset, hidden, positions, segments)
        loss = next_token(h.flatten(0, 1), output, shifted.flatten(), keep.flatten(), select_step=logits_step)
        total, count = total + loss.total, count + loss.count
        metrics[f"nll_{offset}"], metrics[f"count_{offset}"] = loss.metrics["nll"], loss.count
    return Loss(total, count, metrics)
