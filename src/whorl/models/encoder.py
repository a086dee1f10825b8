"""The encoder: token ids in, one vector for a whole text out. Every position sees every other (or, `causal`, those before).

    x  = embedding[ids] + positions[p]                             [B, T, d_model]
    x += attention(norm(x));  x += mlp(norm(x))                    n_layers times, both directions
    pooled = mean of norm(x) over real tokens                      [B, d_model]
    logits = pooled classifier^T       embed = pooled / |pooled|

BERT's stack (Devlin et al. 2018, arXiv:1810.04805, section 3) with norms inside of the branches (Xiong et al. 2020,
arXiv:2002.04745), and the pooling of sentence embedders (Reimers & Gurevych 2019, arXiv:1908.10084, section 3), where the
mean over tokens beat the first token's vector. Two texts are then compared by a product of their unit vectors. CLIP's text
tower (Radford et al. 2021, arXiv:2103.00020, section 2.4) is the same stack with another end: `causal`, and with an `end_id`
the text's vector is that of its first end-of-text token, which alone has seen the whole text.

The subtle part is padding. `mask` is True at real tokens. It is handed to attention as documents of a packed row: real
tokens are one document and padding is another, so that no real token sees padding. Positions are counted over real tokens
alone. A text has therefore the same vector however long its row is, and on whichever side it is padded (a test). A row
without any token has the vector 0, and no NaN: neither in its value nor in its gradient.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.cost import ProfiledTextModule
from whorl.models.language_model import check_ids
from whorl.nn.attention import KeyValueState, MultiHeadAttention
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP, Activation
from whorl.nn.norm import LayerNorm
from whorl.nn.positions.absolute import LearnedPositions
from whorl.nn.positions.rotary import Rotary


class EncoderConfig(BaseModel):
    """The shape of an encoder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(ge=2)
    d_model: int = Field(ge=8)
    n_layers: int = Field(ge=1)
    n_heads: int = Field(ge=1)
    mlp: Activation = "gelu"
    mlp_hidden: int = Field(ge=8)
    max_length: int = Field(default=512, ge=1)
    n_classes: int = Field(default=0, ge=0)  # 0: without a classifier
    norm_eps: float = Field(default=1e-5, gt=0)
    causal: bool = False
    end_id: int | None = Field(default=None, ge=0)  # whose vector is the text's; None: the mean over all

    @model_validator(mode="after")
    def _validate(self) -> EncoderConfig:
        if self.d_model % self.n_heads:
            raise ValueError(f"d_model ({self.d_model}) must be a multiple of n_heads ({self.n_heads})")
        if self.end_id is not None and self.end_id >= self.vocab_size:
            raise ValueError(f"end_id ({self.end_id}) must be below vocab_size ({self.vocab_size})")
        return self


class EncoderBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)).  x: [B, T, d] -> [B, T, d]; at first the identity."""

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
        """positions, segments, state: as in `nn/mixer.py`."""
        x = x + self.attention(self.attention_norm(x), positions=positions, segments=segments, state=state)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens, in fp32.  hidden: [B, T, d]; mask: [B, T], True = real -> [B, d]; 0 where there are none."""
    # Not hidden * mask: what stands at padding may be anything, and 0 * inf is NaN.
    total = hidden.float().masked_fill(~mask[..., None], 0.0).sum(dim=1)
    return total / mask.sum(dim=1, keepdim=True).clamp(min=1)


def end_pool(hidden: Tensor, is_end: Tensor) -> Tensor:
    """The vector of the first token where `is_end`, in fp32.  hidden: [B, T, d]; is_end: [B, T] bool -> [B, d].

    Inside of a compiled region it is not checked that there is one.

    Raises:
        ConfigError: a row has none.
    """
    if not torch.compiler.is_compiling() and not bool(is_end.any(dim=1).all()):
        row = int(is_end.any(dim=1).int().argmin())
        raise ConfigError(
            f"row {row} of ids has no real token end_id",
            expected="end_id, the end-of-text token, in every row: its vector is the text's",
            do="let the tokenizer add it, and cut long texts before it",
        )
    return hidden[torch.arange(len(hidden), device=hidden.device), is_end.int().argmax(dim=1)].float()


class Encoder(ProfiledTextModule):
    """An encoder of texts (see the top of this file).

    Args:
        config: its shape.
        generator: draws the initial weights.
        dtype: the type that activations are computed in; weights, pooling and results are fp32.
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
        """Texts of `size` tokens."""
        ids = torch.zeros(batch, size, dtype=torch.long, device=device)
        return (ids if self.config.end_id is None else ids + self.config.end_id,)

    def profiled_forward(self, *inputs: Tensor) -> Tensor:
        """A vector for each text: a classifier, where there is one, weighs nothing beside it."""
        return self.pool(*inputs)

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """A vector for each token: ids [B, T] -> [B, T, d_model]. What stands at padding means nothing.

        mask: [B, T] bool, True = a real token; None when all are.

        Raises:
            ConfigError: the mask is not bool or not of the shape of ids; a text is longer than `max_length`.
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
        """A vector for each text, of no particular length: ids [B, T] -> [B, d_model] fp32. `hidden` says the rest.

        Raises:
            ConfigError: as `hidden`; a row without a real `end_id`, where the configuration names one.
        """
        hidden, real = self.hidden(ids, mask), self._mask(ids, mask)
        if self.config.end_id is None:
            return mean_pool(hidden, real)
        return end_pool(hidden, real & (ids == self.config.end_id))

    def embed(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """A unit vector for each text, to be compared by products: ids [B, T] -> [B, d_model] fp32; 0 for no text."""
        return F.normalize(self.pool(ids, mask), dim=-1)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Class logits: ids [B, T] -> [B, n_classes] fp32.

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
