"""Sampling 256 tokens with the cache and without.

.venv/bin/python bench/engine/kv_cache.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim

from whorl.engine import SamplingParams, generate, load_for_sampling
from whorl.machine.device_probe import probe
from whorl.models import Decoder, save_model
from whorl.plan.cost import decoder_config
from whorl.tracking.seeds import generator


def main() -> None:
    machine = probe()
    torch.set_num_threads(1)  # one token's operations are too small to split
    with tempfile.TemporaryDirectory() as folder:
        save_model(Decoder(decoder_config(192, 3, 1024), generator(0, "bench")), Path(folder))
        model = load_for_sampling(Path(folder), machine)
    print(f"sampling in {model.dtype}", flush=True)

    def seconds(use_cache: bool) -> float:
        began = time.perf_counter()
        for _ in generate(
            model, [1], SamplingParams(), generator(0, "draw"), max_tokens=256, use_cache=use_cache
        ):
            pass
        return time.perf_counter() - began

    seconds(True)
    pairs = [(seconds(True), seconds(False)) for _ in range(3)]
    ours, peer = sorted(p[0] for p in pairs)[1], sorted(p[1] for p in pairs)[1]
    claim(
        "sampling 256 tokens with the cache against without", ours=ours, peer=peer, unit="s", ratio=ours / peer,
        bar=0.1, ok=ours / peer < 0.1, samples=pairs,
    )  # fmt: skip


if __name__ == "__main__":
    main()
