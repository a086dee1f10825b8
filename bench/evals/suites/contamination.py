"""Planted contamination: all planted items are found by lineage, and the clean score is that of a model without them.

    python bench/evals/suites/contamination.py --save
    python bench/evals/suites/contamination.py --quick     # two seeds, an eighth of the steps, half of the items

Two models of 0.3 M parameters are trained on the same lines of the probes, in the same order. The training text of one also
has 50 items of the task between other lines, each REPEATS times; that of the other has lines of no item in their places.
Five seeds of training, since scores of single models of this size differ by more than the effect.
The task is sorting, at levels 2 to 4.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

sys.path.insert(0, str(Path(__file__).parents[2]))
from _run import claim, parse, sized

import whorl
from whorl.evals.contamination import find_contaminated, training_text, with_contamination
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.probes.suite import probe_task, training_lines
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.statistics.distributions import t_quantile
from whorl.evals.tasks import EvalTask
from whorl.models import TransformerConfig
from whorl.plan.cost import decoder_config
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer

ITEMS, PLANTED, REPEATS, SEEDS = 300, 50, 40, 5
STEPS, BATCH, SEQ_LEN, WIDTH, DEPTH, VOCAB = 900, 8, 128, 96, 2, 360
LEVELS = (2, 3, 4)
TOKENS_PER_LINE = 38


def shape(vocab_size: int) -> TransformerConfig:
    return decoder_config(WIDTH, DEPTH, vocab_size, trained_length=SEQ_LEN, ngram_orders=())


def train(lines: list[str], tokenizer: Tokenizer, out: Path, steps: int, seed: int) -> None:
    """Train one model into `out`, with its token set and tokenizer."""
    whorl.train(
        lines, out=out, tokenizer=tokenizer, steps=steps, batch_size=BATCH, seq_len=SEQ_LEN, evaluations=1, quiet=True,
        seed=seed, model=shape(tokenizer.vocab_size), compile=False, threads=1,
    )  # fmt: skip


def measured(task: EvalTask, folder: Path) -> TaskResult:
    """Return the result of the model in a folder, with its contamination."""
    result = evaluate(EngineBackend.open(folder), [task])[0]
    text = training_text(str(folder), Store(folder / "no-store"))
    return with_contamination(task, result, find_contaminated([task], text.documents())[task.config.name])


def main() -> int:
    """Print both tables and the JSON lines."""
    args = parse(
        __doc__,
        lambda p: p.add_argument("--quick", action="store_true", help="two seeds, an eighth of the steps"),
    )
    steps, items = sized((STEPS // 8, ITEMS // 2) if args.quick else (STEPS, ITEMS), (10, ITEMS))
    task = probe_task("sorting", items=items, shots=0, levels=LEVELS)
    lines = training_lines(
        sized(steps * BATCH * SEQ_LEN // TOKENS_PER_LINE, 300), probes=["sorting", "copying"]
    )
    tokenizer = Tokenizer.train(lines[:3000], VOCAB)
    planted = task.items[:: items // PLANTED][:PLANTED]
    every = max(1, len(lines) // (PLANTED * REPEATS))
    texts = {"without": list(lines), "planted": list(lines)}
    for number in range(PLANTED * REPEATS):  # a line in the middle of a document with other lines
        # Each round is one line further: whorl.train holds out every twentieth document, where an item must not always be.
        place, item = (number * every + number // PLANTED) % len(lines), planted[number % PLANTED]
        for name, text in (("without", lines[place - 2]), ("planted", item.fields["text"])):
            texts[name][place] += f"\n{text}\n{lines[place - 1]}"
    ids, n_found, others = {item.id for item in planted}, [], 0
    scores: dict[str, list[float]] = {"clean": [], "unseen": [], "found": []}
    for seed in range(sized(2 if args.quick else SEEDS, 2)):
        results = {}
        with tempfile.TemporaryDirectory() as scratch:
            for name, text in texts.items():
                train(text, tokenizer, Path(scratch, name), steps, seed)
                results[name] = measured(task, Path(scratch, name))
        found = {item.item for item in results["planted"].items if "contamination" in item.details}
        n_found.append(len(found & ids))
        others += len(found - ids) + sum("contamination" in i.details for i in results["without"].items)
        rest = [r.scores["acc"] for r in results["without"].items if r.item not in ids]
        scores["unseen"].append(mean(rest))
        scores["clean"].append(results["planted"].measure("acc clean").value)
        scores["found"].append(results["planted"].measure("acc found").value)
        print(
            f"seed {seed}: " + ", ".join(f"{name} {each[-1]:.3f}" for name, each in scores.items()),
            flush=True,
        )
    claim(
        f"planted items that are found in the training tokens, the fewest of {len(n_found)} models; {others} others",
        ours=min(n_found), peer=PLANTED, unit="items", ratio=min(n_found) / PLANTED, bar=1.0,
        ok=set(n_found) == {PLANTED} and not others, variant="found", peer_name="planted", quick=args.quick,
    )  # fmt: skip
    leads = [a - b for a, b in zip(scores["clean"], scores["unseen"], strict=True)]
    half = t_quantile(0.95, len(leads) - 1) * stdev(leads) / len(leads) ** 0.5
    low, high = mean(leads) - half, mean(leads) + half
    claim(
        f"clean score of contaminated models, against models that never saw the items; difference {mean(leads):.3f} "
        f"({low:.3f} to {high:.3f}) over {len(leads)} seeds",
        ours=round(mean(scores["clean"]), 4), peer=round(mean(scores["unseen"]), 4), unit="share right", bar=1.0,
        ratio=mean(scores["clean"]) / mean(scores["unseen"]), ok=args.smoke or low <= 0 <= high,
        variant="clean", peer_name="never saw them", samples=[scores], quick=args.quick,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
