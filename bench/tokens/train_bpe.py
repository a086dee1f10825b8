"""BPE training of an 8,192-token vocabulary on the standard library, against Hugging Face `tokenizers`, both on all cores.

python bench/tokens/train_bpe.py [--rounds 3]
python bench/tokens/train_bpe.py --quick     # one round
"""

from __future__ import annotations

import statistics
import sys
import sysconfig
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.tokens.pretokens import PATTERN
from whorl.tokens.tokenizer import Tokenizer

MAX_FILES, VOCABULARY = sized((10**9, 8192), (20, 512))


def library() -> list[str]:
    """The interpreter's standard library as texts; under `--smoke` a part of it."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        if "site-packages" not in path.parts and len(texts) < MAX_FILES:
            try:
                texts.append(path.read_bytes().decode())
            except UnicodeDecodeError:
                continue
    return texts


def peer_tokenizer() -> object:
    """Hugging Face's BPE model with our pre-tokenization."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    peer = Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return peer


def main() -> None:
    from tokenizers import pre_tokenizers, trainers

    a = parse(__doc__, lambda p: p.add_argument("--rounds", type=int, default=3), quick={"rounds": 1})
    texts = library()
    size = sum(len(t.encode()) for t in texts)
    ours, peer = [], []
    for _ in range(a.rounds):
        began = time.perf_counter()
        Tokenizer.train(texts, VOCABULARY)
        ours.append(time.perf_counter() - began)
        began = time.perf_counter()
        peer_tokenizer().train_from_iterator(  # type: ignore[attr-defined]
            texts,
            trainers.BpeTrainer(
                vocab_size=VOCABULARY,
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )
        peer.append(time.perf_counter() - began)
        print(f"{size / 1e6:.1f} MB: ours {ours[-1]:.2f} s, Hugging Face {peer[-1]:.2f} s", flush=True)
    ratio = statistics.median(peer) / statistics.median(ours)
    claim(
        "BPE training of 8,192 tokens on the standard library", ours=statistics.median(ours),
        peer=statistics.median(peer), peer_name="Hugging Face tokenizers", unit="s", ratio=ratio, bar=0.33,
        ok=ratio >= 1 / 3, samples=[ours, peer], quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
