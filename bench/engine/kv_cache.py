"""Time to sample 256 tokens with the KV cache and without.

python bench/engine/kv_cache.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse, sized
from bench.engine.support.no_cache import generate_without_cache

from whorl.engine import EngineConfig, SamplingParams, load_for_sampling
from whorl.engine.engine import Engine
from whorl.machine.device_probe import probe
from whorl.models import Transformer, save_model
from whorl.plan.cost import decoder_config
from whorl.tracking.seeds import generator


def main() -> None:
    parse(__doc__)
    machine, n_tokens = probe(), sized(256, 16)
    torch.set_num_threads(1)  # the operations of one token are too small to parallelize
    with tempfile.TemporaryDirectory() as folder:
        save_model(
            Transformer(decoder_config(*sized((192, 3, 1024), (64, 2, 256))), generator(0, "bench")),
            Path(folder),
        )
        model = load_for_sampling(Path(folder), machine)
    print(f"sampling in {model.dtype}", flush=True)

    def seconds(use_cache: bool) -> float:
        began = time.perf_counter()
        if use_cache:
            engine = Engine(model, EngineConfig.for_batch(1, 1 + n_tokens))
            engine.generate([[1]], SamplingParams(seed=0), max_tokens=n_tokens)
        else:
            list(generate_without_cache(model, [1], SamplingParams(seed=0), max_tokens=n_tokens))
        return time.perf_counter() - began

    seconds(True)
    pairs = [(seconds(True), seconds(False)) for _ in range(sized(3, 1))]
    ours, peer = (sorted(side)[len(pairs) // 2] for side in zip(*pairs, strict=True))
    claim(
        f"{n_tokens} tokens sampled with the KV cache", ours=ours, peer=peer, unit="s", ratio=ours / peer,
        bar=0.08, ok=ours / peer < 0.08, samples=pairs, peer_name="without the cache",
    )  # fmt: skip


if __name__ == "__main__":
    main()
