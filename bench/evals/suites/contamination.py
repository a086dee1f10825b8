"""Planted contamination: all planted items are found by lineage, and the clean score is that of a model without them.

    python bench/evals/suites/contamination.py --save

Two models of 0.3 M parameters are trained on the same lines of the probes. The training text of one also has 50 items of
the task, each REPEATS times between other lines. The task is sorting, at levels 3 to 5.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from _run import claim, parse, sized

import whorl
from whorl.evals.contamination import find_contaminated, training_text, with_contamination
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.probes.suite import probe_task, training_lines
from whorl.evals.results import TaskResult
from whorl.evals.runner import evaluate
from whorl.evals.statistics.comparison import compare
from whorl.evals.tasks import EvalTask
from whorl.models import TransformerConfig
from whorl.plan.cost import decoder_config
from whorl.store import Store
from whorl.tokens.tokenizer import Tokenizer

ITEMS, PLANTED, REPEATS = 300, 50, 40
STEPS, BATCH, SEQ_LEN, WIDTH, DEPTH, VOCAB = 900, 8, 128, 96, 2, 360
LEVELS = (3, 4, 5)
TOKENS_PER_LINE = 33


def shape(vocab_size: int) -> TransformerConfig:
    return decoder_config(WIDTH, DEPTH, vocab_size, trained_length=SEQ_LEN, ngram_orders=())


def train(lines: list[str], tokenizer: Tokenizer, out: Path, steps: int) -> None:
    """Train one model into `out`, with its token set and tokenizer."""
    whorl.train(
        lines, out=out, tokenizer=tokenizer, steps=steps, batch_size=BATCH, seq_len=SEQ_LEN, evaluations=1, quiet=True,
        model=shape(tokenizer.vocab_size), compile=False, threads=1,
    )  # fmt: skip


def measured(task: EvalTask, folder: Path) -> TaskResult:
    """Return the result of the model in a folder, with its contamination."""
    result = evaluate(EngineBackend.open(folder), [task])[0]
    text = training_text(str(folder), Store(folder / "no-store"))
    return with_contamination(task, result, find_contaminated([task], text.documents())[task.config.name])


def main() -> int:
    """Print both tables and the JSON lines."""
    args = parse(__doc__)
    steps = sized(STEPS, 10)
    task = probe_task("sorting", items=ITEMS, shots=0, levels=LEVELS)
    lines = training_lines(
        sized(STEPS * BATCH * SEQ_LEN // TOKENS_PER_LINE, 300), probes=["sorting", "copying"]
    )
    tokenizer = Tokenizer.train(lines[:3000], VOCAB)
    planted = task.items[:: ITEMS // PLANTED][:PLANTED]
    every = max(1, len(lines) // (PLANTED * REPEATS))
    leaked = list(lines)
    for number in range(PLANTED * REPEATS):  # a line in the middle of a document with other lines
        place, item = (number * every) % len(lines), planted[number % PLANTED]
        leaked[place] += f"\n{item.fields['text']}\n{lines[place - 1]}"
    with tempfile.TemporaryDirectory() as scratch:
        results = {}
        for name, text in (("without", lines), ("planted", leaked)):
            train(text, tokenizer, Path(scratch, name), steps)
            results[name] = measured(task, Path(scratch, name))
            for m in results[name].measures:
                if m.metric.startswith("acc") and m.metric.split()[0] == "acc":
                    print(f"{name:<8} {m.metric:<10} {m.value:.3f} ({m.low:.3f} to {m.high:.3f}) of {m.n}")
            print(f"{name:<8} {results[name].notes[-1]}")
    found = {item.item for item in results["planted"].items if "contamination" in item.details}
    ids = {item.id for item in planted}
    claim(
        f"planted items that are found in the training tokens; {len(found - ids)} others are",
        ours=len(found & ids), peer=PLANTED, unit="items", ratio=len(found & ids) / PLANTED, bar=1.0,
        ok=found == ids, variant="found", peer_name="planted",
    )  # fmt: skip
    clean = results["planted"].measure("acc clean") if found else results["planted"].measure("acc")
    rest = [[r for r in results[name].items if r.item not in ids] for name in ("planted", "without")]
    difference = compare(rest[0], rest[1], "acc").paired
    unseen = sum(r.scores["acc"] for r in rest[1]) / len(rest[1])
    claim(
        "clean score of the contaminated model, against a model that never saw the items; difference "
        f"{difference.difference:.3f} ({difference.low:.3f} to {difference.high:.3f})",
        ours=round(clean.value, 4), peer=round(unseen, 4), unit="share right", bar=1.0, ratio=clean.value / (unseen or 1),
        ok=args.smoke or (clean.low <= unseen <= clean.high and difference.low <= 0 <= difference.high),
        variant="clean", peer_name="never saw them", samples=[m.value for m in results["planted"].measures[-2:]],
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
