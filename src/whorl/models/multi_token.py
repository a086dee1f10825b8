"""Several tokens at once: heads that read the same hidden state and predict the tokens at t + 1, t + 2, ..., t + n.

    h^i = norm(block_i(h))                                         [B, T, d_model], i = 1 .. n
    p(x_(t+i) | x_1 .. x_t) = softmax(W h^i_t)                     W, the output matrix, is one for all
    loss = - sum_t sum_i log p(x_(t+i) | x_1 .. x_t)

(Gloeckle et al. 2024, arXiv:2404.19737, eq. 2 and figure 1.) What is learnt: to look ahead, where next-token training only
asks for the nearest. What it gives at inference: a draft of n tokens for one pass of the trunk, which speculative decoding
then verifies. Each block is a whole transformer layer, causal as the trunk is, and starts as the identity.

The paper takes the heads forward and backward one after the other, so that the logits of only one exist at a time (section
2). Here that comes for nothing: `next_token` never holds more than a chunk of any logits.

The subtle part is where a target lies. Position t may learn x_(t+i) only if it belongs to the same document, if the row does
reach so far, and if x_(t+i) is a target at all (`mask`: no prompt, no padding). Borders between documents are counted on
the way, not compared by number, since a row may use a number twice.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.encoder import EncoderBlock
from whorl.nn.attention import KeyValueState
from whorl.nn.kernels.dispatch import logits_step
from whorl.nn.mlp import Activation
from whorl.nn.norm import RMSNorm
from whorl.nn.positions.rotary import Rotary
from whorl.objectives.next_token import Loss, next_token


class MultiTokenPrediction(ProfiledTextModule):
    """n heads over a trunk's hidden states (see the top of this file).

    Args:
        d_model: width of the hidden states. n: tokens that are predicted. n_heads: attention heads of each block.
        mlp_hidden: 4 d_model by default. dtype: of the activations, for the tables of positions.

    Raises:
        ConfigError: n is below 1, or n_heads does not divide d_model into even parts.
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
                expected="d_model a multiple of 2 n_heads: rotary turns pairs of features",
            )
        self.n, self.d_model, self.dtype = n, d_model, dtype
        rotary = Rotary(d_model // n_heads, rope_base, dtype)
        hidden = mlp_hidden or 4 * d_model
        self.blocks = nn.ModuleList(
            EncoderBlock(
                d_model, n_heads, hidden, mlp, causal=True, rotary=rotary, bias=False, generator=generator
            )
            for _ in range(n)
        )
        self.norms = nn.ModuleList(RMSNorm(d_model) for _ in range(n))

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Hidden states of `size` positions. The output matrix is the trunk's, and counts there."""
        return (torch.zeros(batch, size, self.d_model, dtype=self.dtype, device=device),)

    def kv_bytes_per_token(self) -> int:
        """Of all heads' states."""
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
        """What predicts the token `ahead` (1 .. n) positions on: hidden [B, T, d_model] -> the same shape.

        positions: [T] or [B, T], default 0, 1, ...; segments: [B, T] documents of a packed row, or None; states: from
        `new_state`, that of this head is read and extended.

        Raises:
            ConfigError: ahead is not from 1 to n.
        """
        if not 1 <= offset <= self.n:
            raise ConfigError(f"ahead is {offset}", expected=f"from 1 to n = {self.n}")
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
        """All heads: hidden [B, T, d_model] -> n tensors of its shape. Arguments as in `head`."""
        return [self.head(i, hidden, positions, segments, states) for i in range(1, self.n + 1)]

    def new_state(
        self, batch: int, capacity: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> list[KeyValueState]:
        """What drafting keeps of the past, one state a head: its keys and values of up to `capacity` positions."""
        attentions = [block.attention for block in self.blocks if isinstance(block, EncoderBlock)]
        return [a.new_state(batch, capacity, dtype=dtype, device=device) for a in attentions]

    @torch.no_grad()
    def draft(
        self,
        hidden: Tensor,
        output: Tensor,
        positions: Tensor | None = None,
        states: list[KeyValueState] | None = None,
    ) -> Tensor:
        """The likeliest n tokens behind the last position, each by its own head.

        Args:
            hidden: [B, T, d_model] of all positions so far, for the blocks attend to them; with `states`, of those that
                are not in them yet. output: [vocab, d_model].

        Returns:
            [B, n] ids. The first is a token like any sampler's; the others are guesses that know nothing of each other.
        """
        newest = torch.stack(
            [h[:, -1] for h in self(hidden, positions, None, states)], dim=1
        )  # [B, n, d_model]
        return F.linear(newest, output.to(newest.dtype)).float().argmax(dim=-1)


def shift_targets(
    targets: Tensor, mask: Tensor, segments: Tensor | None, offset: int
) -> tuple[Tensor, Tensor]:
    """Targets and mask of the head that looks `ahead` (from 1): both [B, T].

    Args:
        targets: [B, T], what follows each position: targets[:, t] is the token at t + 1.
        mask: [B, T] bool, True where that is a target; made with the tokens.
        segments: [B, T] documents of the positions, or None.
    """
    shift = min(offset - 1, targets.shape[1])
    if shift == 0:
        return targets, mask
    # Position t's target stands at t + shift, and t must be of the document of t + shift (mask says that its target is too).
    found, keep = (F.pad(t[:, shift:], (0, shift)) for t in (targets, mask))
    if segments is not None:
        borders = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0)).cumsum(dim=1)
        keep = keep & (borders == F.pad(borders[:, shift:], (0, shift), value=-1))
    return found, keep


def multi_token_loss(
    heads: MultiTokenPrediction,
    hidden: Tensor,
    output: Tensor,
    targets: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    positions: Tensor | None = None,
) -> Loss:
    """Cross-entropies of all heads, summed over positions and heads, in nats.

    Args:
        hidden: [B, T, d_model], of the trunk. output: [vocab, d_model], fp32, the same for all heads.
        targets, mask, segments: as in `targets_ahead`. positions: as in `MultiToken.head`.

    Returns:
        Loss: `total` [] fp32, `count` [] = predictions of all heads, so that the mean does not grow with n; metrics
        `nll_1` .. `nll_n` and `count_1` .. `count_n`, sums over the positions of each head. Divide one by the other: heads
        that look further have fewer targets.

    Raises:
        ConfigError: shapes that do not fit.
    """
    for name, tensor in (("targets", targets), ("mask", mask), ("segments", segments)):
        if tensor is not None and tensor.shape != hidden.shape[:2]:
            raise ConfigError(f"{name} is {list(tensor.shape)}", expected=f"{list(hidden.shape[:2])}")
    total, count = hidden.new_zeros((), dtype=torch.float32), torch.zeros((), device=hidden.device)
    metrics: dict[str, Tensor] = {}
    for ahead in range(1, heads.n + 1):
        found, keep = shift_targets(targets, mask, segments, ahead)
        h = heads.head(ahead, hidden, positions, segments)
        loss = next_token(h.flatten(0, 1), output, found.flatten(), keep.flatten(), select_step=logits_step)
        total, count = total + loss.total, count + loss.count
        metrics[f"nll_{ahead}"], metrics[f"count_{ahead}"] = loss.metrics["nll"], loss.count
    return Loss(total, count, metrics)
