"""Keys and values in int8: half the size of a bf16 cache, a quarter of fp32, and as much less to read per token.

    k[p, h] ~ codes[p, h] * scale[p, h]          one scale per position and head, over head_dim numbers

A scale per position is computed when the position is, so earlier contents never change: pages can be shared, moved and
evicted. Scales per channel fit the outliers of keys better (Liu et al. 2024, KIVI, arXiv:2402.02750), but need many
positions at once. Keys normalized over head_dim, as in `whorl_decoder`, have no such channels.

Attention need not dequantize, because a scale is a factor of a whole row:

    q . k[p] = (q . codes_k[p]) * scale_k[p]          sum_p w[p] v[p] = sum_p (w[p] * scale_v[p]) codes_v[p]

`attend` computes the right-hand sides; `attend_reference` is the definition. `Int8KVPages` are the engine's pages
(EngineConfig(kv_cache_dtype="int8")). The torch step dequantizes the pages it reads, since torch has no mixed int8 and
float product; the native step multiplies the codes (engine/cpu/decode_attention.h). bench/models/quantization.py
measures the cost in bits per byte.

Shapes: q [B, H, T, d]; codes [B, KV, S, d] int8; scales [B, KV, S] fp32; bias [.., T, S] added to the scores, or None.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from whorl.engine.cache.pages import AttentionGroup, KVPages
from whorl.nn.quantized_linear import quantize_rows


class Int8KV(NamedTuple):
    """codes: [..., d] int8; scale: [...] fp32."""

    codes: Tensor
    scale: Tensor

    @property
    def n_bytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes


def quantize_kv(t: Tensor) -> Int8KV:
    """Quantize keys or values [..., d]; each position and head is scaled by its largest magnitude."""
    codes, scale = quantize_rows(t)
    return Int8KV(codes, scale.squeeze(-1))


def dequantize_kv(quantized: Int8KV, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [..., d] as `dtype`."""
    return (quantized.codes.float() * quantized.scale[..., None]).to(dtype)


def bytes_per_token(n_layers: int, n_kv_heads: int, head_dim: int) -> int:
    """Bytes of keys and values of all layers per position."""
    return 2 * n_layers * n_kv_heads * (head_dim + 4)


def attend_reference(
    q: Tensor, k: Int8KV, v: Int8KV, bias: Tensor | None = None, scale: float = 1.0
) -> Tensor:
    """Reference: dequantize, then attention in fp32; returns [B, H, T, d] in the dtype of q."""
    group = q.shape[1] // k.codes.shape[1]
    keys, values = (dequantize_kv(t).repeat_interleave(group, dim=1) for t in (k, v))
    scores = scale * (q.float() @ keys.transpose(-1, -2))
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return (weights @ values).to(q.dtype)


def attend(q: Tensor, k: Int8KV, v: Int8KV, bias: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """`attend_reference` with the scales applied after the products; codes are cast to the dtype of q, which is exact."""
    batch, heads, length, d = q.shape
    n_kv = k.codes.shape[1]
    grouped = q.reshape(batch, n_kv, -1, d)  # [B, KV, group * T, d]
    scores = (grouped @ k.codes.to(q.dtype).transpose(-1, -2)).float()
    scores = (scores * (scale * k.scale)[:, :, None, :]).view(batch, heads, length, -1)
    weights = (
        (scores if bias is None else scores + bias).softmax(-1).view(batch, n_kv, heads // n_kv * length, -1)
    )
    mixed = (weights * v.scale[:, :, None, :]).to(q.dtype) @ v.codes.to(q.dtype)
    return mixed.view(batch, heads, length, v.codes.shape[-1])


class Int8KVPages(KVPages):
    """Keys and values of one layer in int8, with scales; arguments as of `KVPages`.

    dtype: of the raw keys (before smearing), which are not quantized.
    """

    def __init__(
        self,
        n_pages: int,
        n_kv_heads: int,
        page_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        keep_raw_keys: bool,
    ) -> None:
        super().__init__(n_pages, n_kv_heads, page_size, head_dim, torch.int8, device, False)
        self.raw_keys = torch.zeros(self.k.shape, dtype=dtype, device=device) if keep_raw_keys else None
        self.k_scale, self.v_scale = (torch.zeros(*self.k.shape[:3], 1, device=device) for _ in "kv")

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, self.k_scale, self.v_scale]

    def write(self, k: Tensor, v: Tensor) -> None:
        p = self._require_page_index()
        for codes, scales, new in ((self.k, self.k_scale, k), (self.v, self.v_scale, v)):
            quantized = quantize_kv(new[0].transpose(0, 1))  # [N, KV, d]
            codes[p.page, :, p.page_offset] = quantized.codes
            scales[p.page, :, p.page_offset] = quantized.scale[..., None]

    def _gather_kv(self, group: AttentionGroup, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        pairs = (self.k, self.k_scale), (self.v, self.v_scale)
        k, v = ((self._gather(t, group) * self._gather(s, group)).to(dtype) for t, s in pairs)
        return k, v
