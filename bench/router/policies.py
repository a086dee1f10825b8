"""The router's policy against common policies, in simulated time.

    python bench/router/policies.py [--quick] [--rate CONVERSATIONS_PER_SECOND]

Eight replicas with the engine's own scheduler and cache (`bench/router/_simulation.py`) serve conversations that share
system prompts. Bar: at most half of the median time to first token of the better of round robin and least requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.router._simulation import POLICIES, Outcome, conversations, simulate


def main() -> None:
    given = parse(
        __doc__,
        lambda p: (
            p.add_argument("--quick", action="store_true"),
            p.add_argument("--rate", type=float, default=12.0),
        ),
        smoke={"quick": True},
    )
    n, seeds = sized((150, (0,)) if given.quick else (400, (0, 1)), (12, (0,)))
    found: dict[str, list[Outcome]] = {}
    print(f"{'policy':16} {'hit':>6} {'busiest':>8} {'load':>6} {'TTFT p50':>9} {'p95':>8} {'p99':>8} ms")
    for name, choose in POLICIES.items():
        found[name] = [simulate(conversations(n, given.rate, seed), choose, seed=seed) for seed in seeds]
        one = found[name]
        hit, busiest, load = (mean(getattr(o, x) for o in one) for x in ("hit", "imbalance", "load"))
        late = "".join(f"{1e3 * mean(o.percentile(p) for o in one):9.0f}" for p in (0.5, 0.95, 0.99))
        print(f"{name:16} {hit:6.3f} {busiest:8.3f} {load:6.2f}{late}", flush=True)
    middle = {name: mean(o.percentile(0.5) for o in one) for name, one in found.items()}
    peer = min(middle["round robin"], middle["least requests"])
    claim(
        "median time to first token, eight simulated replicas",
        ours=middle["whorl"], peer=peer, unit="s (simulated)", ratio=middle["whorl"] / peer, bar=0.5,
        ok=middle["whorl"] / peer <= 0.5, quick=given.quick,
        peer_name="the better of round robin and least requests",
        samples=[
            {name: [round(x, 3) for x in (o.hit, o.imbalance, o.percentile(0.5), o.percentile(0.95))]}
            for name, (o, *_) in found.items()
        ],
    )  # fmt: skip


def mean(values: Iterable[float]) -> float:
    some = list(values)
    return sum(some) / len(some)


if __name__ == "__main__":
    main()
