"""Cost of a `Transformer`: FLOPs per token, and bytes that the forward keeps for the backward.

Attention, MLP and experts have formulas; tests compare them with torch's FLOP counter and with what autograd saves. For a
custom mixer, FLOPs beyond its weight matrices are counted on one row, and its activation bytes are measured.

FLOPs of a training token, forward + backward, are a sum (Kaplan et al. 2020, arXiv:2001.08361, table 1):

- 6 x the weight matrices that the token uses, head included, unused experts and look-ups excluded;
- for each attention layer, 6 x n_heads x (key width + value width) x mean keys per position;
- for each custom mixer, 3 x the products of its forward beyond the weights, as executed. These are the pairs within a
  chunk for linear attention, and all earlier positions for HSTU.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from whorl.models.language_model import saved_bytes
from whorl.models.transformer_config import AttentionConfig, MLAConfig, TransformerConfig
from whorl.nn.attention.backends import MAX_BLOCKED_LENGTH
from whorl.nn.attention.causal import QUERY_BLOCK
from whorl.nn.attention.mask import Mask
from whorl.nn.experts import Experts
from whorl.nn.linear import Linear
from whorl.nn.mlp import GATED


def flops_per_token(
    config: TransformerConfig, blocks: nn.ModuleList, matrix_params: int, length: int
) -> float:
    """Return the FLOPs of one training token in rows of `length` (see the top of this file)."""
    pairs = zip(blocks, config.layer_mixers(), strict=True)
    scores = (mixer_cost(mixer, block, config.d_model, length)[0] for block, mixer in pairs)
    return 6.0 * matrix_params + 3.0 * sum(scores)


def mixer_cost(
    mixer: Any, block: Any, d_model: int, length: int, *, decodes: bool = False, masked: bool = True
) -> tuple[float, float]:
    """Return, per position, the FLOPs of a forward beyond the weight matrices, and the numbers that are read and written.

    decodes: one position after `length`, which reads what is cached. masked: False counts the pairs of a mask's zeros, too.
    """
    if isinstance(mixer, AttentionConfig):
        features, cached = 2 * mixer.n_heads * mixer.head_dim, 2 * mixer.n_kv_heads * mixer.head_dim
        keys, window = mean_keys(mixer, length), mixer.window or length
    elif isinstance(mixer, MLAConfig):
        features = mixer.n_heads * (mixer.nope_dim + mixer.rope_dim + mixer.v_dim)
        keys, window, cached = mean_causal_keys(length, None), length, mixer.kv_rank + mixer.rope_dim
    else:
        weights = 2.0 * sum(p.numel() for p in block.mixer.parameters() if p.dim() > 1)
        flops = count_flops(block.mixer, d_model, 1 if decodes else length, weights) if length else weights
        return flops - weights, 2.0 * d_model
    keys = length if not masked else min(length, window) if decodes else keys
    return 2.0 * features * keys, features + cached * (keys if decodes else 1)


@torch.no_grad()
def count_flops(mixer: nn.Module, d_model: int, length: int, weights: float) -> float:
    """Count the FLOPs per token of a mixer's forward.

    Returns `weights` if the counter does not see the products: recurrences run in torch's own kernels.
    """
    x = torch.zeros(1, length, d_model, device=next(mixer.parameters()).device)
    with FlopCounterMode(display=False) as counter:
        mixer(x)
    flops = float(counter.get_total_flops()) / length
    return (
        flops
        if flops >= 2.0 * sum(m.weight.numel() for m in mixer.modules() if isinstance(m, Linear))
        else weights
    )


def mean_keys(m: AttentionConfig, length: int) -> float:
    """Return the mean number of keys per position under a layer's mask."""
    if m.stride is None and m.block is None:
        return mean_causal_keys(length, m.window)
    return _mean_keys_of_mask(length, m.window, m.stride, m.block)


@lru_cache(maxsize=64)
def _mean_keys_of_mask(length: int, window: int | None, stride: int | None, block: int | None) -> float:
    if length == 0:
        return 0.0
    mask = Mask(window=window, stride=stride, block=block)
    return float(mask.dense(length, length, torch.device("cpu")).sum()) / length


def mean_causal_keys(length: int, window: int | None) -> float:
    """Return the mean number of keys per position of a causal row: length / 2, less with a window."""
    if window is None or window >= length:
        return length / 2
    return float(window - window**2 / (2 * length))


def blocked_keys(length: int) -> float:
    """Return the keys per position whose probabilities blockwise attention keeps (`nn/attention/causal.py`)."""
    ends = [*range(QUERY_BLOCK, length, QUERY_BLOCK), length]
    starts = [0, *ends[:-1]]
    return float(sum((stop - start) * stop for start, stop in zip(starts, ends, strict=True)) / length)


def activation_bytes(
    config: TransformerConfig, blocks: nn.ModuleList, dtype: torch.dtype, batch: int, length: int, *, on_cpu: bool
) -> int:  # fmt: skip
    """Return the bytes that the forward keeps for the backward, without logits, loss and rotary tables.

    on_cpu: whether the run is on a CPU; the bytes of attention depend on it. With e bytes per activation, d = d_model and
    T = length, the bytes for each of the batch x length positions are:

        norm       8 d (x and x / rms in fp32), and e d for the input of the next layer.
        attention  e (2 H + 2 KV) d_h (queries, keys, values, output) + 4 H.
                   Normed queries and keys add 8 (H + KV) d_h.
                   Any mask but causal adds e H d_h, and e T^2 once per layer for the mask.
                   On a CPU, causal rows in blocks: e (4 H d_h + H T), where T is half of that in long rows.
                   Softcap or sink (no fused kernel): (12 + e) H d_h + 12 H T, and 2 T^2 once.
        MLA        as attention, with keys of nope + rope and values of v features, and the ranks.
        MLP        4 e hidden with a gate, else 2 e hidden.
        experts    top_k (e d + e width of `up` + 20) + 5 E, in bf16 4 d for the router, and the shared one as an MLP.

    In bf16 a copy of every matrix is added. Custom mixers are measured. On a CPU the result is within 15 % of what autograd
    keeps (tested); a GPU's fused kernels keep the same or less.
    """
    e, d = dtype.itemsize, config.d_model
    total, per_position = 0, 8 + 8 * d  # ids, final norm
    if config.embedding_norm:
        per_position += 4 * d + 4
    for layer, mixer in enumerate(config.layer_mixers()):
        block: Any = blocks[layer]
        norms, inputs = (
            (4 if config.pre_norm else 2, 2) if config.sandwich else (1, 1) if config.parallel else (2, 2)
        )
        per_position += norms * (8 * d + 4) + inputs * e * d + _mlp_bytes(config, e, layer)
        if isinstance(mixer, AttentionConfig):
            layer_total, layer_per_position = attention_bytes(mixer, length, e, on_cpu)
            total, per_position = total + layer_total, per_position + layer_per_position
        elif isinstance(mixer, MLAConfig):
            per_position += mla_bytes(mixer, length, e, on_cpu)
        else:
            total += batch * measured_bytes(block.mixer, d, length, dtype)
    if dtype != torch.float32:
        matrices = [m for m in blocks.modules() if isinstance(m, Linear | Experts)]
        total += e * sum(p.numel() for m in matrices for p in m.parameters() if p.dim() > 1)
    return batch * length * per_position + total


def _mlp_bytes(c: TransformerConfig, e: int, layer: int) -> int:
    factor = 4 if c.mlp in GATED else 2
    if c.experts is None or not c.has_experts(layer):
        return factor * e * c.mlp_hidden
    experts = c.experts
    width = experts.hidden * (2 if c.mlp in GATED else 1)
    router = 5 * experts.n_experts + (4 * c.d_model if e < 4 else 0)
    gate = e * (c.d_model + 1) if experts.shared_gate else 0
    return experts.top_k * (e * (c.d_model + width) + 20) + router + factor * e * experts.shared_hidden + gate


def attention_bytes(m: AttentionConfig, length: int, e: int, on_cpu: bool) -> tuple[int, int]:
    """Return (bytes per layer, bytes per position) that attention keeps; see `activation_bytes`."""
    queries, keys = m.n_heads * m.head_dim, m.n_kv_heads * m.head_dim
    normed = 8 * (queries + keys) + 4 * (m.n_heads + m.n_kv_heads) if m.qk_norm else 0
    if m.softcap is not None or m.sink:
        return 2 * length**2, (12 + e) * queries + 12 * m.n_heads * length + normed
    fused = e * 2 * (queries + keys) + 4 * m.n_heads + normed
    if m.window is None and m.stride is None and m.block is None and not m.alibi:
        if on_cpu and length <= MAX_BLOCKED_LENGTH:
            return 0, normed + e * (4 * queries + round(m.n_heads * blocked_keys(length)))
        return 0, fused
    return e * length**2 * (m.n_heads if m.alibi else 1), fused + e * queries


def mla_bytes(m: MLAConfig, length: int, e: int, on_cpu: bool) -> int:
    """Return the bytes per position that MLA keeps in its expanded form; see `activation_bytes`."""
    key = m.nope_dim + m.rope_dim
    ranks = 4 * (m.kv_rank + m.rope_dim) + 4 * m.kv_rank + e * (m.kv_rank + m.rope_dim) + 4
    ranks += 0 if m.q_rank is None else (8 + e) * m.q_rank + 4
    if on_cpu and length <= MAX_BLOCKED_LENGTH:
        return ranks + e * round(m.n_heads * (2 * key + 2 * m.v_dim + blocked_keys(length)))
    # values stay in the output of kv_b, next to the first part of the keys
    return ranks + e * m.n_heads * (2 * key + m.nope_dim + 2 * m.v_dim) + 4 * m.n_heads


def measured_bytes(mixer: nn.Module, d_model: int, length: int, dtype: torch.dtype) -> int:
    """Return the bytes that autograd keeps of a mixer per row: those of two rows of zeros minus those of one."""
    device = next(mixer.parameters()).device

    def saved(rows: int) -> int:
        x = torch.zeros(rows, length, d_model, dtype=dtype, device=device, requires_grad=True)
        return saved_bytes(lambda: mixer(x), mixer.parameters())

    return saved(2) - saved(1)


def linear_shapes(model: TransformerConfig) -> dict[str, tuple[int, int, int]]:
    """Return the linear layers: name -> (outputs, inputs, layers that have it). Heads of attention and dense MLPs only."""
    found = Counter[tuple[str, int, int]]()
    for number, mixer in enumerate(model.layer_mixers()):
        if isinstance(mixer, AttentionConfig):
            wide, narrow = mixer.n_heads * mixer.head_dim, mixer.n_kv_heads * mixer.head_dim
            heads = [("q", wide), ("kv", narrow), ("kv", narrow)]
            heads = [("qkv", wide + 2 * narrow)] if mixer.fused_qkv else heads
            found.update([*((name, n, model.d_model) for name, n in heads), ("out", model.d_model, wide)])
        if model.experts is None or number in model.experts.dense_layers:
            up = model.mlp_hidden * (2 if model.mlp in GATED else 1)
            found.update([("up", up, model.d_model), ("down", model.d_model, model.mlp_hidden)])
    names = Counter(name for name, _, _ in found)
    return {
        name if names[name] == 1 else f"{name} {n}x{k}": (n, k, count)
        for (name, n, k), count in found.items()
    }


def unlisted_parts(model: TransformerConfig) -> list[str]:
    """Return the parts of the model whose products `linear_shapes` does not have."""
    found = {
        f"{mixer.kind} layers" for mixer in model.layer_mixers() if not isinstance(mixer, AttentionConfig)
    }
    return sorted(found | ({"experts"} if model.experts is not None else set()))
