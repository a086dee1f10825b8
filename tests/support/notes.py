"""A corpus of invented words, and recipes for its tokens and for a model."""

from __future__ import annotations

import random
from pathlib import Path

SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "le", "mi", "no", "pu"]
NOTES_RECIPE = """\
name = "tiny"
steps.ingest = { sources = ["notes"] }
steps.curate = { parents = ["ingest"], validation_bytes = 2000, test_bytes = 2000, max_held_out_fraction = 0.3 }
steps.tokenizer = { parents = ["ingest", "curate"], vocab_size = 320 }
steps.tokens = { parents = ["ingest", "curate", "tokenizer"] }
"""
TRAINING_RECIPE = f"""\
{NOTES_RECIPE}
steps.pretrain = {{ parents = ["plan", "tokens", "tokenizer"], serial_loader = true }}
[steps.plan]
parents = ["ingest", "curate"]
steps = 20
d_model = 64
n_layers = 2
vocab_size = 320
data.seq_len = 32
ngram_buckets = 64
compile = false
replicas = 1
"""


def write_notes(folder: Path, n: int = 60, length: int = 120, recipe: str = NOTES_RECIPE) -> Path:
    """Write `n` texts of `length` words into `folder/notes` and a recipe as `folder/tiny.toml`; return `folder`."""
    (folder / "notes").mkdir()
    for number in range(n):
        rng = random.Random(number)
        words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 6))) for _ in range(length)]
        lines = [" ".join(words[i : i + 8]) for i in range(0, length, 8)]
        (folder / "notes" / f"{number}.txt").write_text("\n".join([f"Note {number}.", *lines, ""]))
    (folder / "tiny.toml").write_text(recipe)
    return folder
