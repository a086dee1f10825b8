"""Encoding the standard library with one 8,192-token vocabulary: our batch encoder against Hugging Face's, on all cores.

    python bench/tokens/encode.py
    python bench/tokens/encode.py --quick     # a fifth of the files

The claim is against `encode_batch`. The script also times `encode_batch_fast`, which omits the offsets of tokens in the
text, as our encoder does. Both sides must give the same ids for every file.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.tokens.train_bpe import library

from whorl.tokens.tokenizer import Tokenizer


def main() -> None:
    import tokenizers

    args = parse(__doc__, smoke={"every": 1}, quick={"every": 5})
    texts = library()[:: args.every if args.quick else 1]
    size = sum(len(t.encode()) for t in texts)
    ours = Tokenizer.train(texts, sized(8192, 512))
    with tempfile.TemporaryDirectory() as folder:
        ours.save(Path(folder))
        theirs = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
    speeds: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(sized(3, 1)):
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
    a, b = statistics.median(speeds[0]), statistics.median(speeds[1])
    claim(
        "batch encoding", ours=a, peer=b, peer_name="Hugging Face tokenizers", unit="MB/s", ratio=a / b, bar=4.0,
        ok=a / b >= 4.0, samples=list(speeds), quick=args.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
