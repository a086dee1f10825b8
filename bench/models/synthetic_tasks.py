"""What each kind of layer learns: looking up, copying what matters, text, experts against a dense model.

    .venv/bin/python bench/models/synthetic_tasks.py                               # all of it, 3 seeds, one thread: about an hour
    .venv/bin/python bench/models/synthetic_tasks.py --task recall --results FILE  # one task; FILE keeps what earlier calls found
    .venv/bin/python bench/models/synthetic_tasks.py --draw --results FILE         # tables, docs/models_proofs.png, from FILE alone
    .venv/bin/python bench/models/synthetic_tasks.py --quick                       # one seed, few steps: only to see that it runs

recall      key-value pairs, then the keys again in another order: the share of values that follow rightly.
copying     tokens at random places among noise, then as many marks: the tokens in order.
repetition  random ids, then the same again: after how many steps heads have formed that copy, and what brings them forward.
text        characters of a play: bits per character on its last tenth, at equal compute (FLOPs of training) and after equal
            CPU seconds of this process, which runs on one thread; 8 experts, top 2, against the dense MLP of the same
            active FLOPs, and how evenly they are used.
longer      copying and text once more with 2 and 3 times as many steps, for what needs them; rates as found above.

The tasks and their papers: `_proofs_tasks.py`; the models, all two layers that differ in their mixer alone, 64 wide (text:
128): `_proofs_models.py`. Every kind of layer gets the same search for its learning rate in every task: one run of `TUNING`
of the steps for each of `RATES`, with a seed that counts nowhere else. A made-up run ends early when 99 of 100 answers are
right in two looks in a row, each at fresh rows; what is told then is the step of the first of the two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.models._synthetic_data import TASKS, Batch, characters, stretches
from bench.models._synthetic_models import RATES, Enough, accuracy, bits_per_character, build, mixers, train
from bench.models._synthetic_report import draw, tables

from whorl.nn.experts import Routing
from whorl.tracking.seeds import numpy_rng

TUNING, TUNING_SEED = 0.3, 100
TOKENS = 1024  # a batch of a made-up task; of text twice as many
KNOWN = 0.99
COPIERS = ["attention", "smeared", "convolved"]
LONGER = {"copying": (2.0, ["Mamba", "not selective", "GRU"]), "text": (3.0, ["attention", "experts"])}
READERS = ["attention", "experts", "Mamba", "linear, decay", "GRU", "LSTM", "RNN"]

Result = dict[str, Any]


class Results:
    """What was found so far, by "task/kind/seed/how"; written to the file after each run, and looked up before."""

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
    """One run of recall, copying or repetition."""
    task = TASKS[name]
    model, rng = build(kind, task.vocab, 64, seed), numpy_rng(seed, name, "batches")
    every, looks = (10 if name == "repetition" else 50), list[float]()

    def known() -> bool:
        return len(looks) > 1 and min(looks[-2:]) >= KNOWN

    def look(step: int) -> None:
        rows = task.make(numpy_rng(seed, name, "look", step), 128, task.sizes[-1])
        looks.append(round(accuracy(model, rows), 4))
        if known():
            raise Enough

    taken, seconds = train(
        model, batches(lambda: task.batch(rng, TOKENS)), rate=rate, steps=steps, every=every, look=look
    )
    found = {
        str(size): round(accuracy(model, task.make(numpy_rng(seed, name, "last", size), 256, size)), 4)
        for size in task.sizes
    }
    reached = taken - every if known() else None
    return {
        "rate": rate,
        "steps": taken,
        "reached": reached,
        "accuracy": found,
        "every": every,
        "looks": looks,
        "cpu_seconds": round(seconds, 1),
    }


def batches(make: Any) -> Iterator[Batch]:
    while True:
        yield make()


def best_rate(results: Results, task: str, kind: str, run: Any, worth: Any) -> float:
    """The rate whose short run `run(rate)` is worth most."""
    found = {rate: once(results, f"{task}/{kind}/tuning/{rate:g}", lambda r=rate: run(r)) for rate in RATES}
    return max(RATES, key=lambda rate: worth(found[rate]))


def synthetic(
    results: Results, name: str, kinds: list[str], a: argparse.Namespace, longer: float = 0
) -> None:
    """Every kind, its rate searched for, then all seeds. longer: with so many times the steps."""

    def worth(found: Result) -> tuple[float, float]:
        return -(found["reached"] or 10**9), sum(found["accuracy"].values())

    def short(kind: str, rate: float) -> Result:
        return made_up(name, kind, TUNING_SEED, rate, int(TUNING * a.steps))

    rates = {k: best_rate(results, name, k, lambda rate, k=k: short(k, rate), worth) for k in kinds}
    steps, task = (int(longer * a.steps), f"{name} longer") if longer else (a.steps, name)
    for seed in range(a.seeds):  # seeds outside: a run that is cut short has all kinds
        for kind in kinds:
            once(
                results, f"{task}/{kind}/{seed}", lambda k=kind, s=seed: made_up(name, k, s, rates[k], steps)
            )


def text(results: Results, kinds: list[str], a: argparse.Namespace, longer: float = 0) -> None:
    """Bits per character at equal compute and after equal CPU seconds."""
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
        records: list[Routing] = []
        bits = bits_per_character(model, held_out, length, records)
        found: Result = {
            "rate": rate,
            "steps": taken,
            "bits": round(bits, 4),
            "cpu_seconds": round(seconds, 1),
        }
        if records:  # one for each layer of each batch
            layers = [torch.stack([r.counts.double() for r in records[n::2]]).sum(dim=0) for n in (0, 1)]
            found["loads"] = [[round(x, 4) for x in (c / c.sum()).tolist()] for c in layers]
        params = model.params()
        return found | {"total": params["total"], "active": params["active"]}

    def worth(found: Result) -> float:
        return -float(found["bits"])

    rates = {}
    for kind in kinds:
        rates[kind] = best_rate(
            results, "text", kind, lambda r, k=kind: run(k, TUNING_SEED, r, "compute", TUNING), worth
        )
    task, ways = ("text longer", ["compute"]) if longer else ("text", ["compute", "seconds"])
    for seed in range(a.seeds):
        for kind in kinds:
            for how in ways:
                key = f"{task}/{kind}/{seed}/{how}"
                once(results, key, lambda k=kind, s=seed, h=how: run(k, s, rates[k], h, longer or 1.0))


def claims(results: Results, a: argparse.Namespace) -> None:
    """What was asked for, one line each; nothing for what was not run."""

    def values(task: str, kind: str, how: str = "") -> list[float]:
        def of(found: Result) -> float:
            return float(found["bits"] if "bits" in found else list(found["accuracy"].values())[-1])

        keys = [f"{task}/{kind}/{seed}{how}" for seed in range(a.seeds)]
        return [of(results.runs[key]) for key in keys if key in results.runs]

    def say(what: str, task: str, ours: str, peer: str, unit: str, how: str = "", more: bool = True) -> None:
        mine, theirs = values(task, ours, how), values(task, peer, how)
        if not (mine and theirs):
            return
        x, y = sum(mine) / len(mine), sum(theirs) / len(theirs)
        claim(
            f"{task}: {what}", ours=round(x, 4), peer=round(y, 4), unit=unit, ratio=x / y if y else 0.0, bar=1.0,
            ok=x > y if more else x < y, quick=a.quick, samples=[mine, theirs],
        )  # fmt: skip

    say("attention against an RNN, 16 pairs", "recall", "attention", "RNN", "share right")
    say("Mamba against linear attention, 16 pairs", "recall", "Mamba", "linear", "share right")
    say(
        "Mamba against the same not selective, 8 tokens",
        "copying longer",
        "Mamba",
        "not selective",
        "share right",
    )
    say(
        "experts against dense, equal active FLOPs",
        "text longer",
        "experts",
        "attention",
        "bits",
        "/compute",
        False,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=[*TASKS, "text", "longer", "all"], default="all")
    parser.add_argument("--kinds", nargs="+", help="only these")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000, help="of the made-up tasks")
    parser.add_argument(
        "--text-steps", type=int, default=300, help="of dense attention; the others as many FLOPs"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="CPU seconds of text")
    parser.add_argument("--text", type=Path, default=Path("../shared/data/tinyshakespeare.txt"))
    parser.add_argument("--results", type=Path, default=Path("models_proofs.json"))
    parser.add_argument("--draw", action="store_true", help="no runs: tables and picture of what is there")
    parser.add_argument("--picture", type=Path, default=Path("docs/models_proofs.png"))
    parser.add_argument(
        "--times",
        type=float,
        help="of --task longer: times the steps; another number needs another --results",
    )
    parser.add_argument("--quick", action="store_true")
    a = parser.parse_args()
    torch.set_num_threads(1)
    if a.quick:
        a.seeds, a.steps, a.text_steps, a.seconds = 1, 60, 30, 2.0
    results = Results(a.results)
    if not a.draw:
        for name in TASKS:
            if a.task in (name, "all"):
                kinds = COPIERS if name == "repetition" else list(mixers(64))
                synthetic(results, name, a.kinds or kinds, a)
        if a.task in ("text", "all"):
            text(results, a.kinds or READERS, a)
        if a.task in ("longer", "all"):
            for name, (factor, kinds) in LONGER.items():
                factor = a.times or factor
                kinds = [k for k in kinds if not a.kinds or k in a.kinds]
                text(results, kinds, a, factor) if name == "text" else synthetic(
                    results, name, kinds, a, factor
                )
    print(tables(results.runs))
    if a.draw or a.task == "all":
        draw(results.runs, a.picture)
    claims(results, a)


if __name__ == "__main__":
    main()
