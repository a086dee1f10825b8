"""Bridges between pictures and words: one that compares them, one that puts them into words.

`DualEncoder`, CLIP (Radford et al. 2021, arXiv:2103.00020, figure 3). Two towers that never meet but in a product:

    x = unit(image tower(pictures))      y = unit(text tower(ids))      scores = exp(t) x y^T        [N, M]

It is trained by `objectives.contrastive.info_nce`. The temperature is learned, as t = log of the scale, from 1 / 0.07 and
bounded at 100 (section 2.5). The subtle part is the bound: past a plain clamp there is no gradient, and a t that Adam's
momentum once carried over it would stay there for good. `bounded` stops only the gradient that pushes further out.

`Captioner`, Flamingo (Alayrac et al. 2022, arXiv:2204.14198, section 2.2 and figure 4). Both parts exist already and are
frozen; between the language model's blocks come new layers that look at the picture:

    h += tanh(a) attention(norm(h), picture);   h += tanh(b) mlp(norm(h))       a = b = 0 at first

So at first the language model is unchanged, to the bit (a test), and what it knows is not undone by random layers. The
subtle part: everywhere else in this house the last matrix of a branch starts at 0. Together with a gate of 0 that is a dead
start: the gate's gradient is the branch (0), and the branch's gradient carries the gate (0). Here the gate alone is 0, and
the last matrices are drawn.

Shapes: pictures [B, C, H, W]; their tokens [B, N, d_image]; ids [B, T]; h [B, T, d_model].
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.decoder import Decoder, DecoderState
from whorl.models.vision.vit import ViT
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.mlp import MLP, Activation
from whorl.nn.norm import LayerNorm


class GatedCrossAttention(nn.Module):
    """A new layer that looks at a picture.  h: [B, T, d], context: [B, N, d_context] -> [B, T, d]; at first h itself."""

    def __init__(
        self,
        d: int,
        n_heads: int,
        mlp_hidden: int,
        d_context: int,
        mlp: Activation = "gelu",
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.context_norm, self.mlp_norm = (
            LayerNorm(d),
            LayerNorm(d_context),
            LayerNorm(d),
        )
        self.attention = MultiHeadAttention(
            d, n_heads, causal=False, context_dim=d_context, generator=generator
        )
        self.mlp = MLP(d, mlp_hidden, mlp, generator)
        for last in (self.attention.out, self.mlp.down):  # not 0: see the top of this file
            nn.init.normal_(last.weight, std=0.6 * last.weight.shape[1] ** -0.5, generator=generator)
        self.attention_gate = nn.Parameter(torch.zeros(()))
        self.mlp_gate = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor, context: Tensor) -> Tensor:
        seen = self.attention(self.attention_norm(h), context=self.context_norm(context))
        h = h + self.attention_gate.tanh().to(h.dtype) * seen
        out: Tensor = h + self.mlp_gate.tanh().to(h.dtype) * self.mlp(self.mlp_norm(h))
        return out


class Captioner(ProfiledTextModule):
    """A frozen decoder that sees pictures through a frozen ViT (see the top of this file).

    What is to be trained are the parameters whose names begin with "bridges.".

    Args:
        decoder, image: used as they are; their parameters are frozen here (`requires_grad`).
        n_heads, mlp_hidden: of the new layers; by default the decoder's own.
        every: a new layer stands before every so-many-th block, from the first on.

    Raises:
        ConfigError: `every` is below 1, or heads that do not divide the decoder's width.
    """

    def __init__(
        self,
        decoder: Decoder,
        image: ViT,
        *,
        n_heads: int | None = None,
        mlp_hidden: int | None = None,
        cross_attn_every: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        c = decoder.config
        n_heads = c.n_heads if n_heads is None else n_heads
        if cross_attn_every < 1:
            raise ConfigError(f"every is {cross_attn_every}", expected="at least 1")
        if n_heads < 1 or c.d_model % n_heads:
            raise ConfigError(f"n_heads is {n_heads}", expected=f"a divisor of d_model, {c.d_model}")
        self.decoder, self.image, self.cross_attn_every = (
            decoder.requires_grad_(False),
            image.requires_grad_(False),
            cross_attn_every,
        )
        d_image = image.positions.shape[1]
        self.bridges = nn.ModuleList(
            GatedCrossAttention(
                c.d_model, n_heads, mlp_hidden or c.mlp_hidden, d_image, c.mlp, generator=generator
            )
            for _ in range(0, c.n_layers, cross_attn_every)
        )

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Captions of `size` tokens under a picture that was looked at before."""
        ids = torch.zeros(batch, size, dtype=torch.long, device=device)
        return ids, torch.zeros(batch, *self.image.positions.shape[-2:], device=device)

    def params(self) -> dict[str, int]:
        """Parameters: total; active; trained (the bridges); embedding (the decoder's tables of ids, and its head)."""
        own, decoder = (sum(p.numel() for p in part.parameters()) for part in (self.bridges, self.image))
        theirs = self.decoder.params()
        total, active = own + decoder + theirs["total"], own + decoder + theirs["active"]
        return {"total": total, "active": active, "trained": own, "embedding": theirs["embedding"]}

    def kv_bytes_per_token(self) -> int:
        """The decoder's: pictures are looked at again, not kept."""
        return self.decoder.kv_bytes_per_token()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, N, d_image]. The tower is frozen, so this can be done once for each picture, and kept."""
        return self.image.tokens(images)

    def forward(self, ids: Tensor, context: Tensor, state: DecoderState | None = None) -> Tensor:
        """ids [B, T], context [B, N, d_image] from `look` -> hidden states [B, T, d_model].

        state: of `decoder.new_state`, read and extended in place; the picture needs none.

        Raises:
            ConfigError: ids and context have other numbers of rows.
        """
        if context.ndim != 3 or len(context) != len(ids):
            raise ConfigError(f"context is {list(context.shape)}", expected=f"[{len(ids)}, N, d_image]")
        d = self.decoder
        embedded, rotary = d.prepare(ids, state=state)
        h = d.embedding_norm(embedded).to(d.dtype)
        context = context.to(d.dtype)
        for number, block in enumerate(d.blocks):
            if number % self.cross_attn_every == 0:
                h = self.bridges[number // self.cross_attn_every](h, context)
            h = block(h, rotary, None, None if state is None else state.layers[number])
        return cast(Tensor, d.final_norm(h))

    @torch.no_grad()
    def generate(self, images: Tensor, bos_id: int, eos_id: int, max_tokens: int) -> list[list[int]]:
        """The likeliest next token, again and again.

        Args:
            images: [B, C, H, W]. begin: id that every caption starts with. end: id that closes it. limit: longest caption.

        Returns:
            The ids of each caption, without `begin` and `end`.
        """
        context, state = self.encode_images(images), self.decoder.new_state(len(images), max_tokens + 1)
        newest = torch.full((len(images), 1), bos_id, device=images.device)
        rows = []
        for _ in range(max_tokens):
            newest = self.decoder.logits(self(newest, context, state)).argmax(dim=-1)  # [B, 1]
            rows.append(newest)
        found = torch.cat(rows, dim=1).tolist() if rows else [[] for _ in images]
        return [row[: row.index(eos_id)] if eos_id in row else row for row in found]
