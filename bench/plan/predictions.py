"""Predictions of plans and outcomes of their runs, on three texts that are no Python, with the probe and without it.

    python bench/plan/predictions.py                    # nine runs: about 40 minutes on two cores
    python bench/plan/predictions.py --reference        # the probe's runs on Python: writes plan/dial/probe_reference.json

The texts: C headers, manual pages, problems with their solutions (GSM8K). Each is run with the whole budget from its files
to `evaluate`; Python's standard library is the control. Smaller budgets complete the runs of seconds and memory. Plan and
outcome are those of `whorl plan audit`. The claims: bits per byte on the three texts within 5 %; seconds and peak memory
within 10 % on eight runs. `law_alone` in the samples is the shipped law's prediction.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, data_path, parse, skip, smoke
from bench.plan._tiny_store import small_sources

from whorl.plan.dial import probe as probing
from whorl.plan.dial.audit import Audited, audit
from whorl.recipes import parse_recipe, run_recipe
from whorl.store import Store
from whorl.tracking.progress import Progress

MAN_BYTES = 40_000_000
REFERENCE = ROOT / "src" / "whorl" / "plan" / "dial" / "probe_reference.json"
REFERENCE_STEPS = (25, 50, 100, 150, 225, 300, 400, 600, 800, 1200)
RECIPE = """
name = "{name}"
[steps.ingest]
sources = ["{source}"]
include = {include}
[steps.curate]
parents = ["ingest"]
[steps.plan]
parents = ["ingest", "curate"]
budget = "{budget}"
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]
[steps.evaluate]
parents = ["ingest", "curate", "tokenizer", "tokens", "pretrain"]
items = 0
samples = 0
baselines = false
"""


def sources(
    folder: Path, names: Sequence[str] = ("headers", "manuals", "problems", "python")
) -> dict[str, tuple[str, str]]:
    """Name -> (source, globs) of each text."""
    if smoke():
        return dict.fromkeys(names, (str(small_sources(folder / "s")), '["*.py"]'))
    texts = {
        "headers": lambda: ("/usr/include", '["*.h"]'),
        "manuals": lambda: (str(write(folder / "manuals", manual_pages())), '["*.txt"]'),
        "problems": lambda: (str(write(folder / "problems", problems())), '["*.txt"]'),
        "python": lambda: ("python-stdlib", '["*"]'),
    }
    return {name: texts[name]() for name in names}


def manual_pages() -> Iterator[tuple[str, str]]:
    """English manual pages, as roff, at equal distances."""
    files = [
        f
        for n in range(1, 9)
        for f in sorted(Path(f"/usr/share/man/man{n}").glob("*.gz"))
        if not f.is_symlink()
    ]
    if len(files) < 1000:
        skip("fewer than 1,000 manual pages in /usr/share/man")
    total = 3 * sum(file.stat().st_size for file in files)
    for file in files[:: max(1, total // MAN_BYTES)]:
        yield f"{file.stem}.txt", gzip.decompress(file.read_bytes()).decode("utf-8", "replace")


def problems() -> Iterator[tuple[str, str]]:
    path = data_path("gsm8k_train.jsonl", "https://github.com/openai/grade-school-math")
    for n, line in enumerate(path.read_text().splitlines()):
        record = json.loads(line)
        yield f"{n:05}.txt", f"{record['question']}\n{record['answer']}\n"


def write(folder: Path, texts: Iterator[tuple[str, str]]) -> Path:
    folder.mkdir(parents=True)
    for name, text in texts:
        (folder / name).write_text(text)
    return folder


def make(store: Store, name: str, source: tuple[str, str], budget: str, until: str | None = None) -> Any:
    text = RECIPE.format(name=name, source=source[0], include=source[1], budget=budget)
    sets = ["curate.validation_bytes=8000", "curate.test_bytes=8000", "plan.steps=8"] if smoke() else []
    recipe = parse_recipe(text, f"{name}.toml", sets=sets)
    return run_recipe(recipe, store, Progress() if not smoke() else Progress.silent(), until=until).artifacts


def started(store: Store, name: str, source: tuple[str, str], budget: str) -> None:
    """Make a recipe in a new process, as a user does: memory of earlier runs would be counted."""
    mode = ["--smoke"] if smoke() else []
    command = [sys.executable, __file__, "--store", str(store.root), "--one", name, *source, budget, *mode]
    subprocess.run(command, check=True)


def write_reference(store: Store, source: tuple[str, str]) -> None:
    """Make the probe's runs on Python and keep their bits per byte."""
    from whorl.corpus import Corpus
    from whorl.plan.training_plan import TrainingPlan

    made = make(store, "python", source, "1e12flops", "plan")
    corpus = Corpus(made["ingest"].path, made["curate"].path)
    job = TrainingPlan.model_validate_json(made["plan"].file("plan.json").read_bytes()).job
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        probing.write_texts(corpus, folder)
        bits = {n: round(probing.train(job, n, folder), 4) for n in REFERENCE_STEPS}
    kept = json.loads(REFERENCE.read_text())
    REFERENCE.write_text(json.dumps({**kept, "bits_per_byte": bits}, indent=1) + "\n")
    print(REFERENCE.read_text())


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--budget", default="300s")
        parser.add_argument(
            "--more", nargs="*", default=["30s", "60s", "120s", "3e13flops"], help="budgets on Python"
        )
        parser.add_argument("--store", default=None, help="kept between calls; default: a temporary one")
        parser.add_argument("--reference", action="store_true")
        parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)

    a = parse(__doc__, arguments, smoke={"more": ["20s"]})
    if a.one:
        make(Store(a.store), a.one[0], (a.one[1], a.one[2]), a.one[3])
        return
    with tempfile.TemporaryDirectory() as top:
        store, texts = Store(a.store or Path(top) / "store"), sources(Path(top) / "texts")
        if a.reference:
            write_reference(store, texts["python"])
            return
        law_alone = {}
        for name, source in texts.items():
            started(store, name, source, a.budget)
            plan = json.loads(store.open(f"{name}/plan").file("plan.json").read_text())
            law_alone[name] = plan["expected"].get("law_bits_per_byte")
        for budget in a.more:
            started(store, f"python-{budget}", texts["python"], budget)
        judge(audit(store), law_alone)


def judge(rows: list[Audited], law_alone: dict[str, Any]) -> None:
    samples = [
        {
            "run": r.run,
            "quantity": r.quantity,
            "predicted": r.predicted,
            "measured": r.measured,
            "note": r.note,
        }
        for r in rows
    ]
    for quantity, bar, what in (
        ("bits_per_byte", 0.05, "the predicted loss on three texts that are no Python"),
        ("seconds", 0.10, "the predicted seconds of training"),
        ("memory_bytes", 0.10, "the predicted peak memory"),
    ):
        chosen = [r for r in rows if r.quantity == quantity]
        if quantity == "bits_per_byte":
            chosen = [r for r in chosen if not r.run.startswith("python")]
        worst = max((abs(r.ratio - 1) for r in chosen), default=0.0)
        claim(
            f"{what}: {len(chosen)} runs", ours=worst, peer=0.0, peer_name="measured", unit="largest relative error",
            ratio=worst, bar=bar, ok=worst <= bar, variant=quantity,
            samples=[*(s for s in samples if s["quantity"] == quantity), {"law_alone": law_alone}],
        )  # fmt: skip


if __name__ == "__main__":
    main()
