"""Each kind of layer on recall, copying, repetition and text, and experts against a dense model.

    python bench/models/synthetic_tasks.py                               # all tasks, 3 seeds, one thread: about an hour
    python bench/models/synthetic_tasks.py --task recall --results FILE  # one task; FILE keeps the results of earlier calls
    python bench/models/synthetic_tasks.py --tables --results FILE       # tables from FILE, without runs
    python bench/models/synthetic_tasks.py --quick                       # the claims' layers: one seed, few steps

recall      key-value pairs, then the keys in another order: share of correct values.
copying     tokens at random places among noise, then as many marks: the tokens in order.
repetition  random ids, then the same again: steps until induction heads form, and the layers that speed it up.
text        characters of a play: bits per character on its last tenth, at equal compute (training FLOPs) and at equal CPU
            seconds on one thread; 8 experts, top 2, against a dense MLP of equal active FLOPs, and the experts' load.
longer      copying and text again with 2 and 3 times the steps for slow layers; rates as above.

Tasks and papers: `_synthetic_data.py`. Models: `_synthetic_models.py`; all have two layers, differ only in the mixer,
and are 64 wide (text: 128). Every kind of layer gets the same search for its learning rate in every task: one run of
`TUNING` of the steps for each of `RATES`, with a separate seed. A synthetic run ends early after two successive
evaluations on fresh rows with 99 % correct; the step of the first of them is reported.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, sized, smoke
from bench.models._synthetic_data import TASKS, Batch, characters, stretches
from bench.models._synthetic_models import (
    RATES,
    StopTraining,
    accuracy,
    bits_per_character,
    build,
    mixers,
    train,
)
from bench.models._synthetic_report import tables

from whorl.nn.experts import Routing
from whorl.tracking.seeds import numpy_rng

TUNING, TUNING_SEED = 0.3, 100
TOKENS = sized(1024, 256)  # per batch of a synthetic task; text has twice as many
EVALUATED = sized(128, 8)  # rows per evaluation
SOLVED = 0.99  # accuracy
COPIERS = ["attention", "smeared", "convolved"]
LONGER = {"copying": (2.0, ["Mamba", "not selective", "GRU"]), "text": (3.0, ["attention", "experts"])}
# Compared by the claims: in recall, and with more steps.
RECALLED = ["attention", "RNN", "Mamba", "linear"]
COMPARED = ["attention", "experts", "Mamba", "not selective"]
READERS = ["attention", "experts", "Mamba", "linear, decay", "GRU", "LSTM", "RNN"]

Result = dict[str, Any]


class Results:
    """Results by "task/kind/seed/limit". The file is written after each run and read at the start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: dict[str, Result] = json.loads(path.read_text())["runs"] if path.exists() else {}

    def add(self, key: str, result: Result) -> Result:
        self.runs[key] = result
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"runs": self.runs}, indent=1) + "\n")
        print(key, json.dumps(result), flush=True)
        return result


def once(results: Results, key: str, run: Any) -> Result:
    return results.runs.get(key) or results.add(key, run())


def made_up(name: str, kind: str, seed: int, rate: float, steps: int) -> Result:
    """Run recall, copying or repetition once."""
    task = TASKS[name]
    model, rng = build(kind, task.vocab, 64, seed), numpy_rng(seed, name, "batches")
    every, evaluations = (10 if name == "repetition" else 50), list[float]()

    def solved() -> bool:
        return len(evaluations) > 1 and min(evaluations[-2:]) >= SOLVED

    def evaluate(step: int) -> None:
        rows = task.make(numpy_rng(seed, name, "look", step), EVALUATED, task.sizes[-1])
        evaluations.append(round(accuracy(model, rows), 4))
        if solved():
            raise StopTraining

    taken, seconds = train(
        model,
        batches(lambda: task.batch(rng, TOKENS)),
        rate=rate,
        steps=steps,
        every=every,
        evaluate=evaluate,
    )
    found = {
        str(size): round(
            accuracy(model, task.make(numpy_rng(seed, name, "last", size), 2 * EVALUATED, size)), 4
        )
        for size in task.sizes
    }
    reached = taken - every if solved() else None
    return {
        "rate": rate,
        "steps": taken,
        "reached": reached,
        "accuracy": found,
        "every": every,
        "evaluations": evaluations,
        "cpu_seconds": round(seconds, 1),
    }


def batches(make: Any) -> Iterator[Batch]:
    while True:
        yield make()


def best_rate(results: Results, task: str, kind: str, run: Any, score: Any) -> float:
    """The rate whose short run `run(rate)` has the best score."""
    found = {rate: once(results, f"{task}/{kind}/tuning/{rate:g}", lambda r=rate: run(r)) for rate in RATES}
    return max(RATES, key=lambda rate: score(found[rate]))


def synthetic(results: Results, name: str, kinds: list[str], a: Namespace, longer: float = 0) -> None:
    """Tune the rate of every kind, then run all seeds. longer: factor of the steps."""

    def score(found: Result) -> tuple[float, float]:
        return -(found["reached"] or 10**9), sum(found["accuracy"].values())

    def short(kind: str, rate: float) -> Result:
        return made_up(name, kind, TUNING_SEED, rate, int(TUNING * a.steps))

    rates = {k: best_rate(results, name, k, lambda rate, k=k: short(k, rate), score) for k in kinds}
    steps, task = (int(longer * a.steps), f"{name} longer") if longer else (a.steps, name)
    for seed in range(a.seeds):  # seeds are the outer loop, so that an interrupted run has all kinds
        for kind in kinds:
            once(
                results, f"{task}/{kind}/{seed}", lambda k=kind, s=seed: made_up(name, k, s, rates[k], steps)
            )


def text(results: Results, kinds: list[str], a: Namespace, longer: float = 0) -> None:
    """Measure bits per character at equal compute and at equal CPU seconds."""
    training, held_out, vocab = characters(a.text)
    width, length, rows = 128, 128, 2 * TOKENS // 128
    flops = build("attention", vocab, width, 0).flops_per_token(length) * a.text_steps

    def run(kind: str, seed: int, rate: float, how: str, share: float = 1.0) -> Result:
        model, rng = build(kind, vocab, width, seed), numpy_rng(seed, "text", "batches")
        limit: dict[str, Any] = (
            {"seconds": a.seconds * share}
            if how == "seconds"
            else {"steps": round(share * flops / model.flops_per_token(length))}
        )
        data = batches(lambda: stretches(training, rng, rows, length))
        taken, seconds = train(model, data, rate=rate, **limit)
        routings: list[Routing] = []
        bits = bits_per_character(model, held_out, length, routings)
        found: Result = {
            "rate": rate,
            "steps": taken,
            "bits": round(bits, 4),
            "cpu_seconds": round(seconds, 1),
        }
        if routings:  # one per layer and batch
            layers = [torch.stack([r.counts.double() for r in routings[n::2]]).sum(dim=0) for n in (0, 1)]
            found["loads"] = [[round(x, 4) for x in (c / c.sum()).tolist()] for c in layers]
        params = model.params()
        return found | {"total": params["total"], "active": params["active"]}

    def score(found: Result) -> float:
        return -float(found["bits"])

    rates = {}
    for kind in kinds:
        rates[kind] = best_rate(
            results, "text", kind, lambda r, k=kind: run(k, TUNING_SEED, r, "compute", TUNING), score
        )
    task, ways = ("text longer", ["compute"]) if longer else ("text", ["compute", "seconds"])
    for seed in range(a.seeds):
        for kind in kinds:
            for how in ways:
                key = f"{task}/{kind}/{seed}/{how}"
                once(results, key, lambda k=kind, s=seed, h=how: run(k, s, rates[k], h, longer or 1.0))


def claims(results: Results, a: Namespace) -> None:
    """Print the claims of the tasks that were run."""

    def values(task: str, kind: str, how: str = "") -> list[float]:
        def value(found: Result) -> float:
            return float(found["bits"] if "bits" in found else list(found["accuracy"].values())[-1])

        keys = [f"{task}/{kind}/{seed}{how}" for seed in range(a.seeds)]
        return [value(results.runs[key]) for key in keys if key in results.runs]

    def compare(
        what: str, task: str, kind: str, peer: str, unit: str, how: str = "", more: bool = True
    ) -> None:
        samples, peers = values(task, kind, how), values(task, peer, how)
        if not (samples and peers):
            return
        x, y = sum(samples) / len(samples), sum(peers) / len(peers)
        claim(
            f"{task}: {what}", ours=round(x, 4), peer=round(y, 4), unit=unit, ratio=x / y if y else 0.0, bar=1.0,
            ok=x > y if more else x < y, quick=a.quick, samples=[samples, peers],
            peer_name=peer, variant=f"{task.split()[0]}-{kind}",
        )  # fmt: skip

    compare("attention against an RNN, 16 pairs", "recall", "attention", "RNN", "share correct")
    compare("Mamba against linear attention, 16 pairs", "recall", "Mamba", "linear", "share correct")
    compare(
        "Mamba against the same not selective, 8 tokens",
        "copying longer",
        "Mamba",
        "not selective",
        "share correct",
    )
    compare(
        "experts against dense, equal active FLOPs",
        "text longer",
        "experts",
        "attention",
        "bits",
        "/compute",
        False,
    )


def arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--task", choices=[*TASKS, "text", "longer", "all"], default="all")
    parser.add_argument("--kinds", nargs="+", help="subset of the kinds")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="steps of the synthetic tasks")
    parser.add_argument(
        "--text-steps", type=int, default=300, help="steps of dense attention; the others get equal FLOPs"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="CPU seconds of the text task")
    parser.add_argument("--text", type=Path, default=Path("../shared/data/tinyshakespeare.txt"))
    parser.add_argument("--results", type=Path, default=Path("models_proofs.json"))
    parser.add_argument("--tables", action="store_true", help="of stored results, without runs")
    parser.add_argument(
        "--times",
        type=float,
        help="factor of the steps in --task longer; another factor needs another --results",
    )
    parser.add_argument("--quick", action="store_true")


def smoke_settings() -> dict[str, Any]:
    """Three kinds of layers, few steps, and a text from the standard library."""
    folder = Path(tempfile.mkdtemp())
    source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    (folder / "text.txt").write_bytes(source.read_bytes()[:12_000])
    return {
        "seeds": 1, "steps": 4, "text_steps": 4, "seconds": 0.1, "kinds": ["attention", "experts", "RNN"],
        "text": folder / "text.txt", "results": folder / "results.json",
    }  # fmt: skip


def main() -> None:
    a = parse(__doc__, arguments, smoke=smoke_settings() if smoke() else None)
    torch.set_num_threads(1)
    if a.quick:
        a.seeds, a.steps, a.text_steps, a.kinds = 1, 60, 20, a.kinds or COMPARED
        a.results = Path(tempfile.mkdtemp()) / "results.json"
    results = Results(a.results)
    if a.quick:  # the rates are those of the full search
        stored = Results(ROOT / "docs" / "models_proofs.json").runs
        results.runs |= {key: run for key, run in stored.items() if "/tuning/" in key}
    if not a.tables:
        for name in ["recall"] if a.quick else TASKS:
            if a.task in (name, "all"):
                kinds = COPIERS if name == "repetition" else list(mixers(64))
                synthetic(results, name, RECALLED if a.quick else a.kinds or kinds, a)
        if a.task in ("text", "all") and not a.quick:
            text(results, a.kinds or READERS, a)
        if a.task in ("longer", "all"):
            for name, (factor, kinds) in LONGER.items():
                factor = a.times or (1.0 if a.quick else factor)
                kinds = [k for k in kinds if not a.kinds or k in a.kinds]
                text(results, kinds, a, factor) if name == "text" else synthetic(
                    results, name, kinds, a, factor
                )
    print(tables(results.runs))
    claims(results, a)


if __name__ == "__main__":
    main()
