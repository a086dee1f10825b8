"""Pretraining that continues on prose after code, against training on both from the start, at equal tokens.

    python bench/train/continued.py --seeds 1

The code is the standard library of Python, the prose tinyshakespeare. One model is pretrained on code, and the step
`midtrain` with its defaults continues it on the prose and a share of the code, as `whorl run continue` does. Its peer of
the same shape, tokenizer and number of tokens reads both in random order from the start. Bits per byte of the start of each
test split: of the new text against the peer's, and of the old text against its own before.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, data_path, parse, sized

from whorl.recipes import parse_recipe, run_recipe
from whorl.recipes.stage import token_set_likelihood
from whorl.store import Artifact, Store
from whorl.tokens.shards import TokenSet
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.progress import Progress

STEPS = sized(3000, 4)
RECIPE = """
name = "continued"
[steps.ingest]
[steps.curate]
parents = ["ingest"]
{plan}
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]
[steps.prose]
uses = "ingest"
sources = ["{prose}"]
[steps.prose_split]
uses = "curate"
parents = ["prose"]
[steps.prose_tokens]
uses = "tokens"
parents = ["prose", "prose_split", "tokenizer"]
[steps.continue]
uses = "midtrain"
parents = {{ model = "pretrain", tokens = "prose_tokens", tokenizer = "tokenizer" }}
data.epochs = {epochs}
seed = {seed}
"""
BOTH = """
name = "continued"
[steps.ingest]
[steps.curate]
parents = ["ingest"]
{first}
[steps.tokenizer]
parents = ["ingest", "curate", "first"]
[steps.all]
uses = "ingest"
sources = ["python-stdlib", "{prose}"]
[steps.all_split]
uses = "curate"
parents = ["all"]
{plan}
[steps.all_tokens]
uses = "tokens"
parents = ["all", "all_split", "tokenizer"]
[steps.pretrain]
parents = ["plan", "all_tokens", "tokenizer"]
"""
PLAN = """[steps.{name}]
uses = "plan"
parents = ["{documents}", "{selection}"]
steps = {steps}
d_model = 128
n_layers = 4
vocab_size = 1024
data.seq_len = 256
seed = {seed}
"""


def run(text: str, store: Store) -> dict[str, Artifact]:
    """Run a recipe and return its artifacts."""
    return dict(run_recipe(parse_recipe(text, "continued.toml"), store, Progress.silent()).artifacts)


def bits(tokens: Artifact, model: Artifact) -> float:
    """Return the bits per byte of the start of a token set's test split."""
    from whorl.models import load_model

    found = token_set_likelihood(TokenSet(tokens.path), load_model(model.path), TokenEncoder.load(model.path))
    assert found is not None
    return found.bits_per_byte


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--epochs", type=float, default=4.0, help="passes over the prose")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "epochs": 0.02})
    prose = data_path("tinyshakespeare.txt", "https://github.com/karpathy/char-rnn")
    news, olds, samples = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        for seed in range(args.seeds):
            plan = PLAN.format(name="plan", documents="ingest", selection="curate", steps=STEPS, seed=seed)
            made = run(RECIPE.format(plan=plan, prose=prose, epochs=args.epochs, seed=seed), store)
            after = made["continue"].summary
            total = STEPS + after["steps"]
            first = plan.replace("[steps.plan]", "[steps.first]")
            plan = PLAN.format(name="plan", documents="all", selection="all_split", steps=total, seed=seed)
            both = run(BOTH.format(first=first, plan=plan, prose=prose), store)["pretrain"]
            new, old = made["prose_tokens"], made["tokens"]
            sets, models = (
                {"new": new, "old": old},
                {"": made["continue"], " of both": both, " before": made["pretrain"]},
            )
            measured = {
                f"{n}{m}": bits(tokens, model) for n, tokens in sets.items() for m, model in models.items()
            }
            samples.append(measured)
            news.append(measured["new"] / measured["new of both"])
            olds.append(measured["old"] / measured["old before"])
            print(
                f"seed {seed}, {after['steps']} steps after {STEPS}: "
                + ", ".join(f"{name} {value:.3f}" for name, value in measured.items()),
                flush=True,
            )
    new, old = statistics.fmean(news), statistics.fmean(olds)
    claim(
        "continued pretraining: bits per byte of the new text against training on both from the start",
        ours=statistics.fmean(m["new"] for m in samples), peer=statistics.fmean(m["new of both"] for m in samples),
        peer_name="both from the start", unit="bits per byte", ratio=new, bar=1.03, ok=new <= 1.03, variant="new",
        samples=samples,
    )  # fmt: skip
    claim(
        "continued pretraining: bits per byte of the old text after it, against before",
        ours=statistics.fmean(m["old"] for m in samples), peer=statistics.fmean(m["old before"] for m in samples),
        peer_name="before", unit="bits per byte", ratio=old, bar=1.02, ok=old <= 1.02, variant="old", samples=samples,
    )  # fmt: skip


if __name__ == "__main__":
    main()
