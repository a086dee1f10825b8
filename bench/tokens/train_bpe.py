"""Training an 8,192-token vocabulary on the standard library, against Hugging Face `tokenizers`, both on all cores.

.venv/bin/python bench/tokens/train_bpe.py
"""

from __future__ import annotations

import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim

from whorl.tokens.pretokens import PATTERN
from whorl.tokens.tokenizer import Tokenizer


def library() -> list[str]:
    """The interpreter's own standard library as texts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts:
            try:
                texts.append(path.read_bytes().decode())
            except UnicodeDecodeError:
                continue
    return texts


def peer() -> object:
    """Their trainer's model with our pre-tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    theirs = Tokenizer(models.BPE())
    theirs.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return theirs


def main() -> None:
    from tokenizers import pre_tokenizers, trainers

    texts = library()
    size = sum(len(t.encode()) for t in texts)
    ours, theirs = [], []
    for _ in range(3):
        began = time.perf_counter()
        Tokenizer.train(texts, 8192)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        peer().train_from_iterator(  # type: ignore[attr-defined]
            texts,
            trainers.BpeTrainer(
                vocab_size=8192, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
            ),
        )
        theirs.append(time.perf_counter() - began)
        print(f"{size / 1e6:.1f} MB: ours {ours[-1]:.2f} s, Hugging Face {theirs[-1]:.2f} s", flush=True)
    ratio = sorted(ours)[1] / sorted(theirs)[1]
    claim(
        "BPE training of 8,192 tokens on the standard library", ours=sorted(ours)[1], peer=sorted(theirs)[1], unit="s",
        ratio=ratio, bar=3.0, ok=ratio <= 3.0, samples=[ours, theirs],
    )  # fmt: skip


if __name__ == "__main__":
    main()
