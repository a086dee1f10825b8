"""Encoding the standard library with one 8,192-token vocabulary: our batch encoder against Hugging Face's, all cores.

.venv/bin/python bench/tokens/encode.py

The claim is against `encode_batch`. Its sibling `encode_batch_fast`, which leaves out where each token stands in the text
(as ours does), is timed beside it and shown. Both sides must give the same ids for every file.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim
from bench.tokens.train_bpe import library

from whorl.tokens.tokenizer import Tokenizer


def main() -> None:
    import tokenizers

    texts = library()
    size = sum(len(t.encode()) for t in texts)
    ours = Tokenizer.train(texts, 8192)
    with tempfile.TemporaryDirectory() as folder:
        ours.save(Path(folder))
        theirs = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    speeds: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(3):
        began = time.perf_counter()
        mine = ours.encode_batch(texts)
        speeds[0].append(size / (time.perf_counter() - began) / 1e6)
        began = time.perf_counter()
        other = theirs.encode_batch(texts, add_special_tokens=False)
        speeds[1].append(size / (time.perf_counter() - began) / 1e6)
        began = time.perf_counter()
        theirs.encode_batch_fast(texts, add_special_tokens=False)
        speeds[2].append(size / (time.perf_counter() - began) / 1e6)
        print(
            "ours {:.1f} MB/s, Hugging Face {:.1f}, fast {:.1f}".format(*(s[-1] for s in speeds)), flush=True
        )
    assert all(m.tolist() == o.ids for m, o in zip(mine, other, strict=True)), "the encodings differ"
    a, b = sorted(speeds[0])[1], sorted(speeds[1])[1]
    claim(
        "batch encoding",
        ours=a,
        peer=b,
        unit="MB/s",
        ratio=a / b,
        bar=4.0,
        ok=a / b >= 4.0,
        samples=list(speeds),
    )


if __name__ == "__main__":
    main()
