"""Cost of LoRA adapters per step: none loaded, loaded but unused, one for all rows, several in one batch.

    python bench/engine/multi_lora.py [--quick]

A decoder of 12 x 768 computes 32 rows of one position in fp32. Adapters have rank 16 on every matrix. Peer in the same
run: a separate forward for each adapter over its rows, which is the only way without mixed batches. Contenders
alternate; figures are medians.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import torch
from bench._run import claim, parse_quick, sized

from whorl.engine.model.multi_lora import Adapters
from whorl.models import Transformer, whorl_decoder
from whorl.models.lora import LoRA, LoRAFactors, init_lora

ROWS, RANK = 32, 16


def main() -> None:
    quick = parse_quick(__doc__)
    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    width = sized(768, 128)
    config = whorl_decoder(
        vocab_size=512, d_model=width, n_layers=2 if quick else 12, n_heads=width // 64, n_kv_heads=width // 64,
        mlp_hidden=4 * width,
        ngram_orders=(),
    )  # fmt: skip
    model = Transformer(config, g).eval()
    adapters = Adapters(model)
    ids = torch.randint(512, (ROWS, 1), generator=g)

    @torch.inference_mode()
    def step(rows: torch.Tensor, numbers: list[int]) -> None:
        with adapters.active(numbers):
            model(rows)

    def separately(numbers: list[int]) -> None:
        for k in sorted(set(numbers)):
            rows = [n for n, adapter in enumerate(numbers) if adapter == k]
            step(ids[rows], [k] * len(rows))

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
        "32, one per row": [1 + n for n in range(ROWS)],
        "8, one of them 25 rows": [*range(2, 9), *[1] * (ROWS - 7)],
    }
    rounds = sized(5 if quick else 15, 2)
    load()
    ways = {name: (lambda numbers=numbers: step(ids, numbers)) for name, numbers in kinds.items()}
    ways["a forward per adapter: 8"] = lambda: separately(kinds["8, mixed"])
    times: dict[str, list[float]] = {name: [] for name in ["none loaded", *ways]}
    for _ in range(rounds):
        held, adapters._loaded = adapters._loaded, {}
        began = time.perf_counter()
        step(ids, [])
        times["none loaded"].append(time.perf_counter() - began)
        adapters._loaded = held
        for name, way in ways.items():
            way()  # successive steps mostly use the same adapters, so their gathered factors are cached
            began = time.perf_counter()
            way()
            times[name].append(time.perf_counter() - began)
    median = {name: sorted(each)[len(each) // 2] for name, each in times.items()}
    base = median["none loaded"]
    print("| 32 rows, one position each | ms per step | relative to none loaded |\n|---|---|---|")
    for name, seconds in median.items():
        print(f"| {name} | {seconds * 1e3:.1f} | {seconds / base:.2f} |")
    samples = {name: round(seconds * 1e3, 3) for name, seconds in median.items()}
    mixed, peer = median["8, mixed"], median["a forward per adapter: 8"]
    claim(
        "step of 32 rows with 8 LoRA adapters in one batch",
        ours=mixed * 1e3, peer=peer * 1e3, unit="ms", ratio=mixed / peer, bar=1.0, ok=mixed < peer,
        samples=[samples], peer_name="one forward for each adapter",
        quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
