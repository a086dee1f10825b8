"""The cost of `whorl run --deterministic`: its training step, compared with the fastest settings that a plan would choose.

    python bench/train/deterministic_cost.py            # the quickstart's shape, and a mixture of experts
    python bench/train/deterministic_cost.py --quick

For each shape, in turn and in one run: the default (the faster of compiled and not, the measured type) and
deterministic (not compiled, float32 on a CPU, MKL's matrix products, torch's deterministic algorithms). The script also
times deterministic and compiled, which is equally reproducible. There is no bar: the figure is for docs/training.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse_quick, sized

from whorl.machine.device_probe import probe
from whorl.models import TransformerConfig
from whorl.plan.cost import decoder_config
from whorl.plan.planner import can_compile
from whorl.train.job import Job
from whorl.train.profiling.step_timer import time_steps

ROUNDS = 5


def main() -> None:
    quick = parse_quick(__doc__)
    machine = probe()
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    experts = {"n_experts": 8, "top_k": 2, "hidden": 128}
    width, rounds, seconds = (64, 1, sized(0.5, 0.02)) if quick else (128, ROUNDS, 3.0)
    shapes = {
        "decoder": decoder_config(width, 3, 1024, ngram_buckets=4096 if quick else 65_536),
        "experts": TransformerConfig.model_validate(
            {"vocab_size": 1024, "d_model": width, "n_layers": 3, "mlp_hidden": 4 * width, "mixers": {"m": heads},
             "experts": experts}
        ),
    }  # fmt: skip
    for name, model in shapes.items():
        base = Job(
            tokens="",
            model=model,
            seq_len=sized(256, 64),
            batch_size=8,
            steps=1,
            replicas=sized(machine.threads, 1),
            compile=False,
        )
        ways = {
            "plain": base.model_copy(update={"dtype": machine.dtype}),
            "deterministic": base.model_copy(update={"deterministic": True}),
        }
        if can_compile() and not quick and name == "decoder":  # the planner never compiles experts
            ways["compiled"] = ways["plain"].model_copy(update={"compile": True})
            ways["deterministic, compiled"] = ways["deterministic"].model_copy(update={"compile": True})
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(rounds):
            for way, job in ways.items():
                times[way].append(time_steps(job, seconds=seconds).step_seconds)
        middle = {way: sorted(found)[len(found) // 2] for way, found in times.items()}
        print(name, ", ".join(f"{way} {seconds * 1e3:.1f} ms" for way, seconds in middle.items()))
        best = min(middle[way] for way in ways if not way.startswith("deterministic"))
        claim(
            f"a deterministic step, {name}", ours=middle["deterministic"] * 1e3, peer=best * 1e3,
            peer_name="default settings", variant=name, unit="ms per step",
            ratio=middle["deterministic"] / best, bar=0.0, ok=True, samples=[times], quick=quick,
        )  # fmt: skip


if __name__ == "__main__":
    main()
