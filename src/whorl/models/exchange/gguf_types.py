"""Number types of GGUF files, and the quantization to Q4_K in NumPy.

`f32`, `f16` and `bf16` keep numbers; `q8_0` has 8.5 bits per weight, `q4_k` 4.5. The `gguf` package quantizes to Q8_0 and
only reads Q4_K.

Q4_K (llama.cpp's format): a block of 256 weights of a row has 8 parts of 32. With codes q in 0 .. 15,

    w = d sc q - dmin m        sc, m: 6 bits per part; d, dmin: float16 per block; all at least 0

For each part, several scales are tried. For the codes of each, scale and offset are the solution of least squares, and the
pair with the smallest error is kept. `d` and `dmin` are then set by the largest of the block, and the codes are rounded
again. Layout of 144 bytes: d, dmin, 12 bytes of sc and m, 128 bytes with the codes of two parts in the low and high halves.

A row that is no multiple of 256 falls back to q8_0, of 32 to f16. Embedding and head are q8_0 in a q4_k file: an error there
reaches every token directly.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whorl.errors import ConfigError

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TYPE_OF = {dtype: name for name, dtype in DTYPES.items()}
FILE_TYPES = {"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q4_k": 14}  # llama.cpp's numbers; 14 is Q4_K_S
TABLES = ("token_embd.", "output.")
CHUNK_BLOCKS = 8192  # of 256 weights that are quantized at once: 8 MB as fp32

Array = NDArray[np.float32]


def type_of_matrix(name: str, tensor: Tensor, wanted: str) -> str:
    """Return the type of a matrix: `wanted`, or the nearest larger one that its rows allow."""
    kind, row = _first_choice(name, wanted), tensor.shape[-1]
    if kind == "q4_k" and row % 256:
        kind = "q8_0"
    return "f16" if kind == "q8_0" and row % 32 else kind


def _first_choice(name: str, wanted: str) -> str:
    return "q8_0" if wanted == "q4_k" and name.startswith(TABLES) else wanted


def fallback_note(kinds: Mapping[str, str], wanted: str) -> str:
    """Return a sentence about the matrices whose rows do not allow `wanted`; empty if there are none."""
    fallen = [name for name, kind in kinds.items() if kind not in ("f32", _first_choice(name, wanted))]
    names = ", ".join(f"{name} ({kinds[name]})" for name in fallen[:3]) + ", ..." * (len(fallen) > 3)
    multiple = {"q4_k": 256, "q8_0": 32}.get(wanted)
    return (
        f"{len(fallen)} of {len(kinds)} tensors are not {wanted}: rows are no multiple of {multiple}: {names}"
        if fallen
        else ""
    )


def to_bytes(gguf: Any, name: str, tensor: Tensor, kind: str) -> NDArray[np.uint8]:
    """Return the bytes of a tensor of a type.

    Raises:
        ConfigError: a weight is too large for float16, which scales have, too.
    """
    if kind not in ("f32", "bf16") and not tensor.abs().max() <= 65504:
        raise ConfigError(
            f"tensor {name!r} holds {tensor.abs().max():.4g}", expected="at most 65504", do="choose bf16"
        )
    if kind == "q4_k":
        return quantize_q4_k(tensor.float().numpy())
    if kind == "q8_0":
        rows = gguf.quants.quantize(tensor.float().contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
        return np.ascontiguousarray(rows).view(np.uint8)
    return tensor.to(DTYPES[kind]).contiguous().view(torch.uint8).numpy()


def quantize_q4_k(weights: NDArray[np.floating[Any]]) -> NDArray[np.uint8]:
    """Return the Q4_K blocks of weights [..., n], n a multiple of 256: [..., n / 256 * 144]."""
    blocks = np.ascontiguousarray(weights, dtype=np.float32).reshape(-1, 8, 32)
    made = [_blocks_to_bytes(blocks[i : i + CHUNK_BLOCKS]) for i in range(0, len(blocks), CHUNK_BLOCKS)]
    return np.concatenate(made).reshape(*weights.shape[:-1], -1)


def _blocks_to_bytes(w: Array) -> NDArray[np.uint8]:
    """Return blocks [n, 8, 32] as bytes [n, 144]."""
    scale, offset = _fit(w)
    d, dmin = ((x.max(1, keepdims=True) / 63).astype(np.float16) for x in (scale, offset))
    sc, m = (np.clip(np.rint(_divide(x, s)), 0, 63) for x, s in ((scale, d), (offset, dmin)))
    step, low = d.astype(np.float32) * sc, dmin.astype(np.float32) * m
    q = np.clip(np.rint(_divide(w + low[..., None], step[..., None])), 0, 15).astype(np.uint8)
    codes = (q[:, 0::2] | q[:, 1::2] << 4).reshape(len(w), 128)
    # Parts 0-3: 6 bits each; parts 4-7: 4 bits in the last bytes, their upper 2 bits above those of parts 0-3.
    s6, m6 = sc.astype(np.uint8), m.astype(np.uint8)
    first = [x[:, :4] | x[:, 4:] >> 4 << 6 for x in (s6, m6)]
    last = s6[:, 4:] & 15 | (m6[:, 4:] & 15) << 4
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *first, last, codes], axis=1)


def _fit(w: Array) -> tuple[Array, Array]:
    """Return scale and offset, both [n, 8] and at least 0, of parts [n, 8, 32], for w = scale q - offset."""
    low, high = np.minimum(w.min(-1), 0), w.max(-1)
    best = np.full(low.shape, np.inf, np.float32)
    scale, offset = np.zeros_like(low), -low
    for steps in np.linspace(13.5, 16.5, 13, dtype=np.float32):
        q = np.clip(np.rint(_divide(w - low[..., None], ((high - low) / steps)[..., None])), 0, 15)
        mean_q, mean_w = q.mean(-1), w.mean(-1)
        spread = ((q - mean_q[..., None]) ** 2).mean(-1)
        a = _divide(((q - mean_q[..., None]) * w).mean(-1), spread)
        b = a * mean_q - mean_w
        through_zero = b < 0  # the offset may only lower the weights
        a = np.maximum(np.where(through_zero, _divide((q * w).mean(-1), (q * q).mean(-1)), a), 0)
        b = np.where(through_zero, 0, np.where(spread > 0, b, -mean_w.clip(max=0)))
        error = ((a[..., None] * q - b[..., None] - w) ** 2).sum(-1)
        better = error < best
        best, scale, offset = (np.where(better, x, y) for x, y in ((error, best), (a, scale), (b, offset)))
    return scale, offset


def _divide(a: NDArray[Any], b: NDArray[Any]) -> Array:
    """Return a / b, and 0 where b is 0."""
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    out: Array = np.divide(
        a, b, out=np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32), where=b != 0
    )
    return out
