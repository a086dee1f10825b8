"""The text encoder: token ids to one vector per text. Attention is bidirectional, or causal with `causal`.

    x  = embedding[ids] + positions[p]                             [B, T, d_model]
    x += attention(norm(x));  x += mlp(norm(x))                    n_layers times
    pooled = mean of norm(x) over real tokens                      [B, d_model]
    logits = pooled classifier^T       embed = pooled / |pooled|

The stack is BERT's (Devlin et al. 2018, arXiv:1810.04805, section 3) with pre-norm (Xiong et al. 2020, arXiv:2002.04745).
The pooling is that of sentence embedders (Reimers & Gurevych 2019, arXiv:1908.10084, section 3), where the mean over
tokens beat the first token's vector. Texts are compared by the product of their unit vectors.

With `causal` and `end_id` this is CLIP's text tower (Radford et al. 2021, arXiv:2103.00020, section 2.4). Its pooled
vector is that of the first end-of-text token, the only one that attends to the whole text.

Subtle point: padding. Attention treats real tokens (`mask` True) and padding as two documents of a packed row, so real
tokens do not attend to padding. Positions count real tokens only. The vector of a text is therefore independent of the
row's length and of the side of the padding (tested). A row without tokens has the vector 0, and no NaN in its gradient.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.language_model import check_ids
from whorl.nn.absolute_positions import LearnedPositions
from whorl.nn.attention import KeyValueState, MultiHeadAttention
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP, Activation
from whorl.nn.norm import LayerNorm
from whorl.nn.rotary import Rotary


class EncoderConfig(BaseModel):
    """The shape of an encoder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(ge=2)
    d_model: int = Field(ge=8)
    n_layers: int = Field(ge=1, le=10_000)
    n_heads: int = Field(ge=1)
    mlp: Activation = "gelu"
    mlp_hidden: int = Field(ge=8)
    max_length: int = Field(default=512, ge=1)
    n_classes: int = Field(default=0, ge=0)  # 0: no classifier
    norm_eps: float = Field(default=1e-5, gt=0)
    causal: bool = False
    end_id: int | None = Field(default=None, ge=0)  # token that is pooled; None: mean over all tokens

    @model_validator(mode="after")
    def _validate(self) -> EncoderConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})")
        if self.end_id is not None and self.end_id >= self.vocab_size:
            raise ValueError(f"end_id ({self.end_id}) must be below vocab_size ({self.vocab_size})")
        return self


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  x: [B, T, d] -> [B, T, d]; the identity at initialization."""

    def __init__(
        self,
        d: int,
        n_heads: int,
        mlp_hidden: int,
        mlp: Activation = "gelu",
        *,
        causal: bool = False,
        rotary: Rotary | None = None,
        bias: bool = True,
        eps: float = 1e-5,
        backend: str = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = LayerNorm(d, eps, bias)
        self.attention = MultiHeadAttention(
            d,
            n_heads,
            rotary=rotary,
            bias=bias,
            out_bias=bias,
            causal=causal,
            backend=backend,
            generator=generator,
        )
        self.mlp_norm = LayerNorm(d, eps, bias)
        self.mlp = MLP(d, mlp_hidden, mlp, generator, bias=bias)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        segments: Tensor | None = None,
        state: KeyValueState | None = None,
    ) -> Tensor:
        """Compute the block; positions, segments, state: as in `nn/mixer.py`."""
        x = x + self.attention(self.attention_norm(x), positions=positions, segments=segments, state=state)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average over real tokens in fp32.  hidden: [B, T, d]; mask: [B, T], True = real -> [B, d]; 0 without real tokens."""
    # Not hidden * mask: values at padding are arbitrary, and 0 * inf is NaN.
    total = hidden.float().masked_fill(~mask[..., None], 0.0).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def end_pool(hidden: Tensor, is_end: Tensor) -> Tensor:
    """Return the fp32 vector of the first token where `is_end`.  hidden: [B, T, d]; is_end: [B, T] bool -> [B, d].

    Compiled code does not check that each row has one.

    Raises:
        ConfigError: a row has no such token.
    """
    if not torch.compiler.is_compiling() and not bool(is_end.any(dim=1).all()):
        row = int(is_end.any(dim=1).int().argmin())
        raise ConfigError(
            f"row {row} of ids has no real token end_id",
            expected="the end-of-text token in every row: it is pooled",
            do="add it in the tokenizer, and truncate long texts before it",
        )
    return hidden[torch.arange(len(hidden), device=hidden.device), is_end.int().argmax(dim=1)].float()


class Encoder(ProfiledTextModule):
    """An encoder of texts (see the top of this file).

    Args:
        config: its shape.
        generator: draws the initial weights.
        dtype: type of the activations; weights, pooling and results are fp32.
    """

    def __init__(
        self,
        config: EncoderConfig,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        d = config.d_model
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, d, generator=generator) * 0.02)
        self.positions = LearnedPositions(config.max_length, d, generator=generator)
        self.blocks = nn.ModuleList(
            EncoderBlock(
                d,
                config.n_heads,
                config.mlp_hidden,
                config.mlp,
                causal=config.causal,
                eps=config.norm_eps,
                generator=generator,
            )
            for _ in range(config.n_layers)
        )
        self.final_norm = LayerNorm(d, config.norm_eps)
        self.classifier = (
            Linear(d, config.n_classes, std=d**-0.5, bias=True, generator=generator)
            if config.n_classes
            else None
        )

    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return texts of `size` tokens."""
        ids = torch.zeros(batch, size, dtype=torch.long, device=device)
        return (ids if self.config.end_id is None else ids + self.config.end_id,)

    def profiled_forward(self, *inputs: Tensor) -> Tensor:
        """Compute the pooled vectors; the cost of a classifier is negligible."""
        return self.pool(*inputs)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute a vector per token: ids [B, T] -> [B, T, d_model]. Values at padding are arbitrary.

        mask: [B, T] bool, True = a real token; None when all are.

        Raises:
            ConfigError: the mask is not bool or does not have the shape of ids; a text is longer than `max_length`.
        """
        check_ids(ids, self.config.vocab_size)
        mask = self._mask(ids, mask)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        x = (F.embedding(ids, self.embedding) + self.positions(positions)).to(self.dtype)
        segments = mask.long()
        for block in self.blocks:
            x = block(x, segments=segments)
        out: Tensor = self.final_norm(x)
        return out

    def pool(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute a vector per text, not normalized: ids [B, T] -> [B, d_model] fp32. Arguments as in `hidden`.

        Raises:
            ConfigError: as `hidden`; the configuration has an `end_id` and a row has no real token of it.
        """
        hidden, real = self.hidden(ids, mask), self._mask(ids, mask)
        if self.config.end_id is None:
            return mean_pool(hidden, real)
        return end_pool(hidden, real & (ids == self.config.end_id))

    def embed(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute a unit vector per text: ids [B, T] -> [B, d_model] fp32; 0 for an empty text."""
        return F.normalize(self.pool(ids, mask), dim=-1)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute class logits: ids [B, T] -> [B, n_classes] fp32.

        Raises:
            ConfigError: n_classes is 0; and as `hidden`.
        """
        if self.classifier is None:
            raise ConfigError(
                "n_classes is 0: this encoder has no classifier",
                expected="at least 1 to call it",
                do="set n_classes, or use embed() or pool()",
            )
        logits: Tensor = self.classifier(self.pool(ids, mask))
        return logits

    @staticmethod
    def _mask(ids: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return torch.ones_like(ids, dtype=torch.bool)
        if mask.shape != ids.shape or mask.dtype != torch.bool:
            raise ConfigError(
                f"mask is {list(mask.shape)} of {mask.dtype}", expected=f"{list(ids.shape)} of torch.bool"
            )
        return mask
