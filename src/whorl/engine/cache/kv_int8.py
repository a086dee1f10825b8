"""Keys and values in int8: half the size of a bf16 cache, a quarter of fp32, and as much less to read per token.

    k[p, h] ~ codes[p, h] * scale[p, h]          one scale per position and head, over head_dim numbers

A scale per position is computed when the position is, so earlier contents never change: pages can be shared, moved and
evicted. Scales per channel fit the outliers of keys better (Liu et al. 2024, KIVI, arXiv:2402.02750), but need many
positions at once. Keys normalized over head_dim, as in `whorl_decoder`, have no such channels.

Attention need not dequantize, because a scale is a factor of a whole row:

    q . k[p] = (q . codes_k[p]) * scale_k[p]          sum_p w[p] v[p] = sum_p (w[p] * scale_v[p]) codes_v[p]

`Int8KVPages` are the engine's pages (EngineConfig(kv_cache_dtype="int8")). The native step multiplies the codes
(engine/cpu/decode_attention.h). The torch step dequantizes the pages it reads, since torch has no mixed int8 and float
product. bench/models/quantization.py measures the cost in bits per byte.

Shapes: codes [.., d] int8; scales [..] fp32.
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


def quantize_kv(t: Tensor) -> Int8KV:
    """Quantize keys or values [..., d]; each position and head is scaled by its largest magnitude."""
    codes, scale = quantize_rows(t)
    return Int8KV(codes, scale.squeeze(-1))


def dequantize_kv(quantized: Int8KV, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return [..., d] as `dtype`."""
    return (quantized.codes.float() * quantized.scale[..., None]).to(dtype)


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
