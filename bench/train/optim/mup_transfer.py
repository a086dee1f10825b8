"""Transfer of the best learning rate from a narrow to a wide model: sweeps of the rate at four widths.

    python bench/train/optim/mup_transfer.py                  # all runs, then the picture: 15 minutes on two quiet cores
    python bench/train/optim/mup_transfer.py --draw           # tables and docs/training_mup.png from the existing results
    python bench/train/optim/mup_transfer.py --quick          # two widths, few steps: only checks that it runs

The model is the built-in decoder with two layers, without n-gram embeddings, heads of 32, and MLPs four times as wide.
It trains on the characters of a play. The first two methods are AdamW for all matrices with rates independent of the
width, and with muP (`train/optim/mup.py`, base width 64). The other two are Muon for the blocks' matrices with the
default rates, and with muP for the weights that AdamW trains. In each, *all* rates of `OptimConfig` are multiplied by
2^k. The loss is that of held-out text after the run, a mean over the seeds.

For each method the script reports the best k at each width, its shift from width 64 to 512, and the loss at 512 from
using the k of width 64. The best k is the vertex of a parabola through the lowest point and its neighbours, as the
minimum is flat and the grid coarse.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse, sized, smoke
from bench.models._synthetic_data import characters, stretches
from bench.train.optim._text import make_text

from whorl.machine.device_probe import probe
from whorl.models import whorl_decoder
from whorl.objectives.next_token import next_token
from whorl.parallel.process_group import ProcessGroup
from whorl.tracking.seeds import numpy_rng
from whorl.train.config import OptimConfig, ScheduleConfig
from whorl.train.job import Job
from whorl.train.lm.build import allocate_shared, build_learner, build_model
from whorl.train.optim.lr_schedule import lr_scale

WIDTHS, BASE = (64, 128, 256, 512), 64
WAYS: dict[str, dict[str, Any]] = {
    "AdamW": {"optimizer": "adamw"},
    "AdamW, muP": {"optimizer": "adamw", "mup_base_width": BASE},
    "Muon": {},
    "Muon, muP": {"mup_base_width": BASE},
}
POWERS = {"AdamW": range(-3, 5), "AdamW, muP": range(-1, 5), "Muon": range(-2, 4), "Muon, muP": range(-2, 4)}
SEEDS = {64: 4, 128: 3, 256: 2, 512: 1}  # narrow models are cheap and vary more
LENGTH, ROWS = 64, 8
SCHEDULE = ScheduleConfig(warmup_ratio=0.1)
RATES = ("lr_muon", "lr_adamw", "lr_embedding", "lr_scalar")
MOST_LOSS = 0.02  # relative loss from using the rate of width 64 at 512

Run = dict[str, Any]


def train(way: str, width: int, power: int, seed: int, steps: int, text: Path, dtype: str) -> Run:
    """One run; its held-out loss in nats per character."""
    torch.set_num_threads(1)
    training, held_out, vocab = characters(text)
    plain = OptimConfig()
    optim = OptimConfig(**WAYS[way], **{name: getattr(plain, name) * 2.0**power for name in RATES})
    shape = whorl_decoder(
        vocab_size=vocab, d_model=width, n_layers=2, n_heads=width // 32, n_kv_heads=width // 32, head_dim=32,
        mlp_hidden=4 * width, ngram_orders=(),
    )  # fmt: skip
    job = Job(tokens="", model=shape, optim=optim, seq_len=LENGTH, batch_size=ROWS, steps=steps, seed=seed, dtype=dtype,
              compile=False)  # fmt: skip
    model = build_model(job)
    (update,) = build_learner(model, job, allocate_shared(model, job), ProcessGroup()).updates
    rng, began, losses = numpy_rng(seed, "mup", "batches"), time.process_time(), list[float]()
    for step in range(steps):
        part = stretches(training, rng, ROWS, LENGTH)
        update.accumulate(
            update.objective(
                {"tokens": part["tokens"], "targets": part["targets"], "loss_mask": part["mask"]}
            )
        )
        losses.append(update.step(lr_scale(step, steps, SCHEDULE))["nll"])
        if not losses[-1] < 20.0:  # diverged, or NaN
            break
    with torch.no_grad():
        n = 256
        rows = held_out[: n * LENGTH].view(n, LENGTH)
        due = held_out[1 : n * LENGTH + 1]
        found = next_token(
            model(rows).flatten(0, 1), model.head_weight, due, torch.ones_like(due, dtype=torch.bool)
        )
    loss = float(found.total / found.count)
    return {
        "way": way, "width": width, "power": power, "seed": seed, "steps": steps, "dtype": dtype,
        "loss": round(loss, 4) if len(losses) == steps and loss < 20.0 else None,
        "cpu_seconds": round(time.process_time() - began, 1),
    }  # fmt: skip


def _train(job: tuple[Any, ...]) -> Run:
    return train(*job)


def key(run: Run) -> tuple[Any, ...]:
    return run["way"], run["width"], run["power"], run["seed"], run["steps"]


def plain(way: str, width: int) -> str:
    """At its base width muP changes nothing: the run without it counts for both."""
    return way.removesuffix(", muP") if width == BASE else way


def curve(runs: list[Run], way: str, width: int) -> dict[int, float]:
    """Mean loss by power, where no seed was lost."""
    found: dict[int, list[float | None]] = {}
    for run in runs:
        if (run["way"], run["width"]) == (plain(way, width), width):
            found.setdefault(run["power"], []).append(run["loss"])
    return {p: statistics.mean(x) for p, x in sorted(found.items()) if None not in x}  # type: ignore[type-var]


def best(losses: dict[int, float]) -> float:
    """Where the minimum is: the vertex of the parabola through the lowest point and its neighbours."""
    low = min(losses, key=lambda p: losses[p])
    if low - 1 not in losses or low + 1 not in losses:
        return float(low)  # at an end of the grid
    left, middle, right = (losses[low + d] for d in (-1, 0, 1))
    return low + 0.5 * (left - right) / (left - 2 * middle + right)


def at(losses: dict[int, float], power: float) -> float:
    """The loss at a power between two of the grid, by a straight line."""
    below = max((p for p in losses if p <= power), default=min(losses))
    above = min((p for p in losses if p >= power), default=max(losses))
    share = (power - below) / (above - below) if above > below else 0.0
    return losses[below] + share * (losses[above] - losses[below])


def summary(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Of each way: the best power and its loss by width, how far it moves, and what that costs at the widest."""
    found: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        curves = {w: c for w in WIDTHS if len(c := curve(runs, way, w)) >= 3}
        if len(curves) < 2:
            continue
        narrow, wide = min(curves), max(curves)
        powers = {w: best(c) for w, c in curves.items()}
        lowest = min(curves[wide].values())
        found[way] = {
            "best": {str(w): round(p, 2) for w, p in powers.items()},
            "loss": {str(w): round(min(c.values()), 4) for w, c in curves.items()},
            "moves": round(powers[wide] - powers[narrow], 2),
            "cost": round(at(curves[wide], powers[narrow]) / lowest - 1, 4),
        }
    return found


def draw(runs: list[Run], picture: Path) -> None:
    """Loss against rate: a panel a way, a line a width."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(WAYS), figsize=(13, 3.4), sharey=True, layout="constrained")
    colours = plt.get_cmap("viridis")(torch.linspace(0.1, 0.85, len(WIDTHS)).tolist())
    lowest = min(r["loss"] for r in runs if r["loss"] is not None)
    for axis, way in zip(axes, WAYS, strict=True):
        for width, colour in zip(WIDTHS, colours, strict=True):
            if losses := curve(runs, way, width):
                axis.plot(
                    list(losses), list(losses.values()), "o-", ms=3, lw=1.2, color=colour, label=str(width)
                )
                low = min(losses, key=lambda p: losses[p])
                axis.plot([low], [losses[low]], "*", ms=10, color=colour)
        axis.set(title=way, xlabel="all rates times 2 to this power", ylim=(lowest - 0.05, lowest + 0.9))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out loss, nats per character")
    axes[0].legend(title="width", fontsize=8)
    figure.savefig(picture, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, default=Path("../shared/data/tinyshakespeare.txt"))
    parser.add_argument("--results", type=Path, default=Path("docs/training_mup.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/training_mup.png"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true")


def main() -> None:
    a = parse(__doc__, add_arguments, smoke={"quick": True, "workers": 1, "widths": [64]})
    widths, ways = a.widths, WAYS
    if a.quick:
        widths, a.steps, a.results = sized((64, 128), (64,)), sized(10, 2), Path("/dev/null")
    if smoke():
        a.text = make_text()
    runs: list[Run] = json.loads(a.results.read_text())["runs"] if a.draw else []
    dtype = probe().dtype
    jobs = [
        (way, width, power, seed, a.steps, a.text, dtype)
        for seed in range(1 if a.quick else max(SEEDS.values()))
        for width in widths
        for way in ways
        if plain(way, width) == way
        for power in (range(sized(-2, -1), sized(2, 1)) if a.quick else POWERS[way])
        if seed < SEEDS[width]
    ]
    if not a.draw:
        with multiprocessing.get_context("spawn").Pool(a.workers) as pool:
            for run in pool.imap_unordered(_train, jobs):
                runs.append(run)
                print(json.dumps(run), flush=True)
        if not a.quick:
            lines = ",\n".join(json.dumps(r) for r in sorted(runs, key=lambda r: str(key(r))))
            a.results.write_text(f'{{"summary": {json.dumps(summary(runs))},\n"runs": [\n{lines}\n]}}\n')
    found = summary(runs)
    for way, each in found.items():
        print(f"{way:>11}: best power by width {each['best']}, losses {each['loss']}; it shifts by {each['moves']:+.2f}; "
              f"the rate of the narrowest at the widest costs {each['cost']:.1%}")  # fmt: skip
    if a.draw or not a.quick:
        draw(runs, a.picture)
    ours, peer = found.get("AdamW, muP", {}).get("cost", 1.0), found.get("AdamW", {}).get("cost", 1.0)
    claim(
        "loss at width 512 with the best rate of width 64 under muP", ours=ours, peer=peer, peer_name="AdamW without muP",
        unit="relative loss above the best", ratio=ours, bar=MOST_LOSS,
        ok=ours <= MOST_LOSS, samples=[found], quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
