"""Experts over ranks: placement by measured load, and what tokens that wait for a full expert gain and cost.

    python bench/parallel/experts.py            # trains a small mixture of experts on Python's standard library, minutes

Table 1: the busiest rank's load over the mean, experts placed by number and by load. Loads are measured on one half of the
held-out text, the imbalance on the other, per micro-batch.

Table 2: decoding of 64 sequences on 4 ranks. A pass computes all layers once; its time is the sum over layers of the
busiest rank's, from timed products. Tokens beyond an expert's capacity lose it (drop), take another (next), or wait in a
buffer for the next pass (wait); `cold` lets experts with few tokens wait, so that products are larger. Waiting changes no
result, so its bits are those of dropless routing: it only trades the latency of some tokens for the time of a pass.
"""

from __future__ import annotations

import math
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse
from torch import Tensor

from whorl.models import Transformer, make_model, whorl_decoder
from whorl.nn.experts import MixtureOfExperts, Routing, apply_experts
from whorl.nn.experts.router import assign_with_capacity
from whorl.objectives.next_token import next_token
from whorl.objectives.routing import load_balance
from whorl.parallel.expert_dispatch import place_experts

EXPERTS, TOP_K, LAYERS, WIDTH, HIDDEN, LENGTH, SEQUENCES, RANKS = 16, 2, 4, 128, 128, 256, 64, 4


def load_imbalance(loads: Sequence[float], owners: Sequence[int]) -> float:
    """Return the load of the busiest rank over the mean of all ranks: the step waits for that rank."""
    totals = [0.0] * (max(owners) + 1)
    for load, rank in zip(loads, owners, strict=True):
        totals[rank] += load
    return max(totals) * len(totals) / sum(totals)


def text_rows() -> Tensor:
    """Bytes of the standard library in rows of LENGTH + 1."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    ids = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    rows = ids[: len(ids) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]


def bits(model: Transformer, rows: Tensor, routings: list[Routing] | None = None) -> Tensor:
    """Sum of bits of all bytes."""
    x, positions = model.prepare(rows[:, :-1])
    hidden = model.trunk(x, positions, routings=routings)
    loss = next_token(
        hidden.flatten(0, 1), model.head_weight, rows[:, 1:].flatten(), torch.ones(rows[:, 1:].numel())
    )
    return loss.total / math.log(2)


def train(rows: Tensor, steps: int) -> Transformer:
    experts = {"n_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN}
    config = whorl_decoder(256, WIDTH, LAYERS, 2, 2, mlp_hidden=HIDDEN, ngram_orders=(), experts=experts)
    model = make_model(config, torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(steps):
        batch, found = rows[torch.arange(16 * step, 16 * step + 16) % len(rows)], list[Routing]()
        loss = bits(model, batch, found) / batch[:, 1:].numel()
        for routing in found:  # a weak loss: real routers stay uneven
            loss = (
                loss
                + 1e-3
                * load_balance(routing.scores, routing.requested, torch.ones(len(routing.scores))).total
                / 4096
            )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def routed(model: Transformer, rows: Tensor) -> list[Tensor]:
    """The experts of each token, [LAYERS] of [rows, LENGTH, TOP_K]."""
    found: list[Routing] = []
    bits(model, rows, found)
    return [r.chosen.nonzero()[:, 1].view(len(rows), LENGTH, TOP_K) for r in found]


def placement_table(first: list[Tensor], second: list[Tensor]) -> tuple[float, float]:
    print("ranks   by number   by load     (busiest rank over mean, per micro-batch of 1,024 tokens)")
    result = (0.0, 0.0)
    for ranks in (2, 4, 8):
        found = []
        for by_load in (False, True):
            values = []
            for known, new in zip(first, second, strict=True):
                loads = torch.bincount(known.flatten(), minlength=EXPERTS).tolist()
                owners = place_experts(loads if by_load else [0.0] * EXPERTS, ranks)
                for part in new.split(4):
                    values.append(
                        load_imbalance(torch.bincount(part.flatten(), minlength=EXPERTS).tolist(), owners)
                    )
            found.append(mean(values))
        print(f"{ranks:5}   {found[0]:9.3f}   {found[1]:7.3f}", flush=True)
        result = (found[0], found[1]) if ranks == RANKS else result
    return result


def product_seconds() -> list[float]:
    """Seconds of one expert for 0 to 2 x SEQUENCES tokens, interpolated between timed sizes."""
    up, down = [torch.randn(HIDDEN, WIDTH)], [torch.randn(WIDTH, HIDDEN)]
    sizes, timed = [1, 2, 4, 8, 16, 32, 64, 128], [0.0]
    for n in sizes:
        x, tokens, ones = torch.randn(n, WIDTH), torch.arange(n), torch.ones(n)
        samples = []
        for _ in range(60):
            began = time.perf_counter()
            apply_experts(x, tokens, ones, torch.tensor([n]), up, down, "relu2")
            samples.append(time.perf_counter() - began)
        timed.append(sorted(samples)[15])
    points = list(zip([0, *sizes], timed, strict=True))
    result = []
    for n in range(2 * SEQUENCES + 1):
        (a, s), (b, t) = next((p, q) for p, q in pairwise(points) if p[0] <= n <= q[0])
        result.append(s + (t - s) * (n - a) / (b - a))
    return result


def decode(
    chosen: list[Tensor], owners: list[list[int]], seconds: list[float], capacity: int, cold: int = 0
) -> tuple[float, list[float]]:
    """Seconds per token, and the latency of every token, of passes in which an expert takes at most `capacity` tokens.

    cold: experts with fewer tokens wait, at most 3 passes.
    """
    queues = [[deque[tuple[int, int]]() for _ in range(EXPERTS)] for _ in range(LAYERS)]
    missing = [0] * SEQUENCES  # experts of the current layer that have not answered
    position, started, latencies, now, turn = [0] * SEQUENCES, [0.0] * SEQUENCES, list[float](), 0.0, 0
    held = [[0] * EXPERTS for _ in range(LAYERS)]

    def enter(layer: int, sequence: int) -> None:
        missing[sequence] = TOP_K
        for expert in chosen[layer][sequence, position[sequence]].tolist():
            queues[layer][expert].append((sequence, turn))

    for sequence in range(SEQUENCES):
        enter(0, sequence)
    while min(position) < LENGTH - 1:
        turn += 1
        for layer in range(LAYERS):
            busy = [0.0] * RANKS
            for expert, queue in enumerate(queues[layer]):
                ready = len(queue) >= cold or held[layer][expert] >= 3
                held[layer][expert] = 0 if ready or not queue else held[layer][expert] + 1
                taken = min(len(queue), capacity) if ready else 0
                busy[owners[layer][expert]] += seconds[taken]
                for _ in range(taken):
                    sequence, _turn = queue.popleft()
                    missing[sequence] -= 1
                    if missing[sequence] == 0 and layer + 1 < LAYERS:
                        enter(layer + 1, sequence)
                    elif missing[sequence] == 0:
                        missing[sequence] = -1
            now += max(busy)
        for sequence in [s for s, n in enumerate(missing) if n == -1]:
            latencies.append(now - started[sequence])
            started[sequence], position[sequence] = now, (position[sequence] + 1) % LENGTH
            enter(0, sequence)
        if len(latencies) > SEQUENCES * LENGTH:
            break
    return now / len(latencies), latencies


@torch.no_grad()
def bits_with_capacity(model: Transformer, rows: Tensor, capacity: int, overflow: str) -> float:
    """Bits per byte where an expert takes at most `capacity` of the tokens at one position of all rows."""

    def choose(router: torch.nn.Module, scores: Tensor) -> tuple[Tensor, Tensor]:
        by_position = scores.view(len(rows), LENGTH, EXPERTS).transpose(0, 1)
        placed = [assign_with_capacity(s, TOP_K, capacity, overflow) for s in by_position]  # type: ignore[arg-type]
        chosen = torch.stack(placed, dim=1).flatten(0, 1)
        return chosen, chosen.sum(dim=0)

    routers = [m.router for m in model.modules() if isinstance(m, MixtureOfExperts)]
    for router in routers:
        router._choose = choose.__get__(router)  # type: ignore[method-assign]
    try:
        return float(bits(model, rows)) / rows[:, 1:].numel()
    finally:
        for router in routers:
            del router._choose


def buffering_table(
    model: Transformer, rows: Tensor, owners: list[list[int]]
) -> list[dict[str, float | str]]:
    chosen, seconds, found = routed(model, rows), product_seconds(), []
    exact, fair = float(bits(model, rows).detach()) / rows[:, 1:].numel(), SEQUENCES * TOP_K / EXPERTS

    def add(name: str, quality: float, per_token: float, latencies: list[float]) -> None:
        ordered = sorted(latencies)
        p50, p99 = (1e6 * ordered[int(q * (len(ordered) - 1))] for q in (0.5, 0.99))
        found.append({"policy": name, "bits": quality, "us": 1e6 * per_token, "p50": p50, "p99": p99})
        print(f"{name:16} {quality:12.4f} {1e6 * per_token:12.2f} {p50:12.0f} {p99:12.0f}", flush=True)

    print(f"{'policy':16} {'bits/byte':>12} {'us/token':>12} {'p50 us':>12} {'p99 us':>12}")
    everything = SEQUENCES * TOP_K
    add("dropless", exact, *decode(chosen, owners, seconds, everything))
    for factor in (1.0, 1.25, 1.5, 2.0):
        capacity = math.ceil(factor * fair)
        for overflow in ("drop", "next"):
            quality = bits_with_capacity(model, rows, capacity, overflow)
            # No rank has more than its experts' capacity; the time is that of full experts, at most that of dropless.
            time_each = min(found[0]["us"] / 1e6, LAYERS * EXPERTS / RANKS * seconds[capacity] / SEQUENCES)
            add(f"{overflow} {factor}", quality, time_each, [time_each * SEQUENCES])
        add(f"wait {factor}", exact, *decode(chosen, owners, seconds, capacity))
    for few in (2, 4):
        add(f"cold {few}", exact, *decode(chosen, owners, seconds, everything, few))
    return found


def main() -> None:
    options = parse(__doc__, lambda p: p.add_argument("--steps", type=int, default=800), smoke={"steps": 4})
    torch.set_num_threads(max(1, torch.get_num_threads()))
    rows = text_rows()
    model = train(rows[:-192], options.steps)
    first, second = routed(model, rows[-192:-128]), routed(model, rows[-128:-64])
    before, after = placement_table(first, second)
    loads = [torch.bincount(layer.flatten(), minlength=EXPERTS).tolist() for layer in first]
    found = buffering_table(model, rows[-64:], [place_experts(load, RANKS) for load in loads])
    waits = [row for row in found if str(row["policy"]).startswith(("wait", "cold"))]
    best, plain = min(waits, key=lambda row: row["us"]), found[0]
    claim(
        f"imbalance of {RANKS} ranks above 1, experts placed by load against by number", ours=after, peer=before,
        unit="busiest/mean", ratio=(after - 1) / (before - 1), bar=0.8, ok=after - 1 <= 0.8 * (before - 1),
        samples=found, variant="placement", peer_name="by number",
    )  # fmt: skip
    claim(
        f"time of a token with buffering ({best['policy']}) against dropless, equal bits", ours=best["us"],
        peer=plain["us"], unit="us/token", ratio=best["us"] / plain["us"], bar=1.0, ok=True,
        samples=[best, plain], variant="buffering", peer_name="dropless",
    )  # fmt: skip


if __name__ == "__main__":
    main()
