"""Image captioner after Flamingo (Alayrac et al. 2022, arXiv:2204.14198, section 2.2 and figure 4).

A trained ViT and a trained language model are frozen. New cross-attention layers before the language model's blocks read
the image:

    h += tanh(a) attention(norm(h), image);   h += tanh(b) mlp(norm(h))       a = b = 0 at initialization

The language model is therefore bit-identical at first (tested), and random layers do not damage it.

Subtle point: elsewhere in this package the last matrix of a branch starts at 0. Together with a gate of 0, both gradients
would be 0: the gate's gradient contains the branch, and the branch's gradient contains the gate. Here only the gate starts
at 0.

Shapes: images [B, C, H, W]; their tokens [B, N, d_image]; ids [B, T]; h [B, T, d_model].
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.language_model import LanguageModel
from whorl.models.transformer import Transformer, TransformerState
from whorl.models.transformer_config import AttentionConfig
from whorl.models.vision.vit import ViT
from whorl.nn.attention import MultiHeadAttention
from whorl.nn.mlp import MLP, Activation
from whorl.nn.norm import LayerNorm


class GatedCrossAttention(nn.Module):
    """A gated cross-attention layer.  h: [B, T, d], context: [B, N, d_context] -> [B, T, d]; at first the identity."""

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
        attended = self.attention(self.attention_norm(h), context=self.context_norm(context))
        h = h + self.attention_gate.tanh().to(h.dtype) * attended
        out: Tensor = h + self.mlp_gate.tanh().to(h.dtype) * self.mlp(self.mlp_norm(h))
        return out


class Captioner(ProfiledTextModule):
    """A frozen decoder that attends to image tokens of a frozen ViT (see the top of this file).

    Only parameters with names that begin with "bridges." are trainable.

    Args:
        decoder, image: trained networks; their parameters are frozen here (`requires_grad`).
        n_heads, mlp_hidden: of the new layers; by default the decoder's own.
        cross_attn_every: a new layer precedes every so-many-th block, beginning with the first.

    Raises:
        ConfigError: a model of another type; `cross_attn_every` is below 1; n_heads does not divide the decoder's width.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        image: nn.Module,
        *,
        n_heads: int | None = None,
        mlp_hidden: int | None = None,
        cross_attn_every: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(decoder, Transformer):
            raise ConfigError(
                f"the language model is a {type(decoder).__name__}",
                expected="a Transformer: cross-attention precedes its blocks",
            )
        if not isinstance(image, ViT):
            raise ConfigError(
                f"the image network is a {type(image).__name__}",
                expected="a ViT, which gives a vector per patch",
            )
        c = decoder.config
        first = c.layer_mixers()[0]
        if n_heads is None and isinstance(first, AttentionConfig):
            n_heads = first.n_heads
        if cross_attn_every < 1:
            raise ConfigError(f"cross_attn_every is {cross_attn_every}", expected="at least 1")
        if n_heads is None or n_heads < 1 or c.d_model % n_heads:
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
        """Return captions of `size` tokens and image tokens."""
        ids = torch.zeros(batch, size, dtype=torch.long, device=device)
        return ids, torch.zeros(batch, *self.image.positions.shape[-2:], device=device)

    def params(self) -> dict[str, int]:
        """Count parameters: total; active; trained (the new layers); embedding (the decoder's, and its head)."""
        trained, image = (sum(p.numel() for p in part.parameters()) for part in (self.bridges, self.image))
        decoder = self.decoder.params()
        total, active = trained + image + decoder["total"], trained + image + decoder["active"]
        return {"total": total, "active": active, "trained": trained, "embedding": decoder["embedding"]}

    def kv_bytes_per_token(self) -> int:
        """Return the decoder's bytes per token: image tokens are not cached."""
        return self.decoder.kv_bytes_per_token()

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """Encode images [B, C, H, W] -> [B, N, d_image]. The tower is frozen, so the result can be cached."""
        return self.image.tokens(images)

    def forward(self, ids: Tensor, context: Tensor, state: TransformerState | None = None) -> Tensor:
        """Compute hidden states [B, T, d_model] of ids [B, T] and context [B, N, d_image] from `encode_images`.

        state: of `decoder.new_state`, read and extended in place; the image needs none.

        Raises:
            ConfigError: ids and context have different numbers of rows.
        """
        if context.ndim != 3 or len(context) != len(ids):
            raise ConfigError(f"context is {list(context.shape)}", expected=f"[{len(ids)}, N, d_image]")
        d = self.decoder
        embedded, positions = d.prepare(ids, state=state)
        h = d.embedding_norm(embedded).to(d.dtype)
        context = context.to(d.dtype)
        for number, block in enumerate(d.blocks):
            if number % self.cross_attn_every == 0:
                h = self.bridges[number // self.cross_attn_every](h, context)
            h = block(h, positions, None, None if state is None else state.layers[number], None, [])
        return cast(Tensor, d.final_norm(h))

    @torch.no_grad()
    def generate(self, images: Tensor, bos_id: int, eos_id: int, max_tokens: int) -> list[list[int]]:
        """Generate captions greedily.

        Args:
            images: [B, C, H, W].
            bos_id, eos_id: first and last id of every caption.
            max_tokens: longest caption.

        Returns:
            The ids of each caption, without `bos_id` and `eos_id`.
        """
        context, state = self.encode_images(images), self.decoder.new_state(len(images), max_tokens + 1)
        newest = torch.full((len(images), 1), bos_id, device=images.device)
        rows = []
        for _ in range(max_tokens):
            newest = self.decoder.logits(self(newest, context, state)).argmax(dim=-1)  # [B, 1]
            rows.append(newest)
        found = torch.cat(rows, dim=1).tolist() if rows else [[] for _ in images]
        return [row[: row.index(eos_id)] if eos_id in row else row for row in found]
