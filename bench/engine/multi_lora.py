"""What LoRA adapters cost a step: none loaded, loaded and not used, one for all, several in one batch.

    python bench/engine/multi_lora.py [--quick]

The products of a decoder of 12 x 768 (its own forward, 32 rows of one position, fp32), and with each way of giving the rows
adapters of rank 16 on every matrix. Peer in the same run: a forward for each adapter over its rows alone, which is what
there is without a mixed batch. In turn, medians.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim

from whorl.engine.model.multi_lora import Adapters
from whorl.models import Decoder, DecoderConfig
from whorl.models.lora import LoRA, LoRAFactors, init_lora

ROWS, RANK = 32, 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    config = DecoderConfig(
        vocab_size=512, d_model=768, n_layers=2 if quick else 12, n_heads=12, n_kv_heads=12, mlp_hidden=3072,
        ngram_orders=(),
    )  # fmt: skip
    model = Decoder(config, g).eval()
    adapters = Adapters(model)
    ids = torch.randint(512, (ROWS, 1), generator=g)

    @torch.inference_mode()
    def step(rows: torch.Tensor, numbers: list[int]) -> None:
        with adapters.active(numbers):
            model(rows)

    def alone(numbers: list[int]) -> None:
        for k in sorted(set(numbers)):
            mine = [n for n, of in enumerate(numbers) if of == k]
            step(ids[mine], [k] * len(mine))

    def load() -> None:
        for n in range(ROWS):
            one = init_lora(model, RANK, 32.0, generator=g)
            parts = {
                k: LoRAFactors(p.a, torch.randn(p.b.shape, generator=g) * 0.01, p.scale)
                for k, p in one.factors.items()
            }
            adapters.add(str(n), LoRA(parts))

    kinds: dict[str, list[int]] = {
        "none active": [0] * ROWS,
        "one, all rows": [1] * ROWS,
        "one, half of the rows": [1, 0] * (ROWS // 2),
        "8, mixed": [1 + n % 8 for n in range(ROWS)],
        "32, each row its own": [1 + n for n in range(ROWS)],
        "8, one of them 25 rows": [*range(2, 9), *[1] * (ROWS - 7)],
    }
    rounds = 5 if quick else 15
    load()
    ways = {name: (lambda numbers=numbers: step(ids, numbers)) for name, numbers in kinds.items()}
    ways["a forward for each: 8, mixed"] = lambda: alone(kinds["8, mixed"])
    times: dict[str, list[float]] = {name: [] for name in ["none loaded", *ways]}
    for _ in range(rounds):
        held, adapters._loaded = adapters._loaded, {}
        began = time.perf_counter()
        step(ids, [])
        times["none loaded"].append(time.perf_counter() - began)
        adapters._loaded = held
        for name, way in ways.items():
            way()  # a server's next step has mostly the same adapters: what was picked is still there
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    median = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    base = median["none loaded"]
    print("| 32 rows, one position each | ms a step | of none |\n|---|---|---|")
    for name, seconds in median.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / base:.2f} |")
    samples = {name: round(seconds * 1e3, 3) for name, seconds in median.items()}
    mixed, apart = median["8, mixed"], median["a forward for each: 8, mixed"]
    claim(
        "a step of 32 rows with 8 LoRA adapters mixed, against a forward for each adapter",
        ours=mixed * 1e3, peer=apart * 1e3, unit="ms", ratio=mixed / apart, bar=1.0, ok=mixed < apart,
        samples=[samples],
        quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
