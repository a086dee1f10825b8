"""Decoding with latent attention against multi-head attention of the same width: time per token and cache bytes.

python bench/nn/mla_decode.py [--quick]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse_quick

from whorl.machine.device_probe import probe
from whorl.nn.attention.mla import MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.rotary import Rotary

D_MODEL, HEADS, HEAD_DIM = 1024, 16, 64
# DeepSeek-V2's proportions: a latent of 4 heads' features, a rotary key of half a head's.
SIZES = {"kv_rank": 4 * HEAD_DIM, "nope_dim": HEAD_DIM, "rope_dim": HEAD_DIM // 2, "v_dim": HEAD_DIM}


def filled(layer, batch: int, context: int, room: int, dtype: torch.dtype):
    """A state with `context` positions in it, taken in as a model would."""
    state = layer.new_state(batch, context + room, dtype=dtype)
    for start in range(0, context, 512):
        layer(torch.randn(batch, min(512, context - start), D_MODEL, dtype=dtype), state=state)
    return state


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    machine.apply()
    dtype, batch = machine.torch_dtype, 1
    context, tokens, rounds = (512, 8, 1) if quick else (4096, 32, 5)
    layers = {
        "latent": MultiHeadLatentAttention(
            D_MODEL, HEADS, **SIZES, rotary=Rotary(SIZES["rope_dim"], 10_000.0, dtype)
        ),
        "expanded": MultiHeadLatentAttention(
            D_MODEL, HEADS, **SIZES, rotary=Rotary(SIZES["rope_dim"], 10_000.0, dtype)
        ),
        "multi-head": MultiHeadAttention(D_MODEL, HEADS, rotary=Rotary(HEAD_DIM, 10_000.0, dtype)),
    }
    rows = []
    with torch.inference_mode():
        states = {}
        for name, layer in layers.items():
            states[name] = filled(layer, batch, context, rounds * tokens, dtype)
        layers[
            "expanded"
        ].form = "expanded"  # recomputes the keys and values of all past positions for each token
        for _ in range(rounds):  # contenders alternate, so that noise affects all
            for name, layer in layers.items():
                milliseconds = []
                for _ in range(tokens):
                    x = torch.randn(batch, 1, D_MODEL, dtype=dtype)
                    began = time.perf_counter()
                    layer(x, state=states[name])
                    milliseconds.append((time.perf_counter() - began) * 1e3)
                rows.append({"layer": name, "ms": sorted(milliseconds)[tokens // 2]})
                print(
                    f"{name}: {rows[-1]['ms']:.3f} ms a token at {states[name].length} positions", flush=True
                )
    best = {name: min(row["ms"] for row in rows if row["layer"] == name) for name in layers}
    per_position = {
        n: states[n].n_bytes / batch / (context + rounds * tokens) for n in ("latent", "multi-head")
    }
    print(f"cache: {per_position} bytes a position and layer, in {dtype}")
    fewer = per_position["multi-head"] / per_position["latent"]
    claim(
        "cache bytes of latent attention", ours=per_position["latent"],
        peer=per_position["multi-head"], unit="bytes per position", ratio=fewer, bar=5.0, ok=fewer >= 5.0, quick=quick,
        peer_name="multi-head attention", variant="cache",
    )  # fmt: skip
    ratio = best["multi-head"] / best["latent"]
    claim(
        f"latent attention, absorbed decoding at {context} positions", ours=best["latent"],
        peer=best["multi-head"], unit="ms per token", ratio=ratio, bar=1.0, ok=ratio >= 1.0, samples=rows, quick=quick,
        peer_name="multi-head attention",
    )  # fmt: skip


if __name__ == "__main__":
    main()
