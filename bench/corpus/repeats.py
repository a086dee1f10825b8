"""Memorisation against the number of repeats, measured on a trained model.

    python bench/corpus/repeats.py [--steps 220] [--passages 12] [--seeds 2] [--quick] [--save]

The training text is the standard library's in documents of about 2 kB, each once. Among them are passages of 128 tokens
that are repeated 0, 1, 2, 4, ... 64 times, in random places. A passage is a chain of made-up words, so it can be learned
only by heart, and 0 times gives the bits of unseen words. After one epoch, for each number of repeats:

- bits per byte of the passages.
- the share of the second half of a passage that greedy decoding repeats after the first half, in tokens from its start.

The claim is that share at four repeats, the limit on epochs of the step `mix` (`max_epochs`, after Muennighoff et al. 2023,
Scaling Data-Constrained Language Models), against 64 repeats. Extraction after a prefix is the measure of Carlini et al.
2023, Quantifying Memorization Across Neural Language Models.
"""

from __future__ import annotations

import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from bench.corpus.support.training import BATCH, LENGTH, VOCABULARY, trained, write_tokens

from whorl.corpus import Document
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.tokens.tokenizer import Tokenizer

REPEATS = (0, 1, 2, 4, 8, 16, 32, 64)
PASSAGE, PIECE = sized(128, 24), 2000


def document(number: int, text: str) -> Document:
    return Document(f"{number:032x}", "bench", str(number), None, 0, text, len(text), None)


def passage(tokenizer: Tokenizer, rng: np.random.Generator) -> str:
    """Return a chain of made-up words of PASSAGE tokens."""
    letters, words = np.array(list("abcdefghiklmnoprstuvw")), list[str]()
    while True:
        words.append("".join(rng.choice(letters, rng.integers(2, 8))))
        if len(tokenizer.encode(" ".join(words))) >= PASSAGE:
            return " ".join(words)


def extracted(model: Any, ids: np.ndarray) -> float:
    """Return the share of the second half that greedy decoding repeats before its first error."""
    half = len(ids) // 2
    row = torch.tensor(ids[None, :-1].astype(np.int64), device=model.embedding.device)
    with torch.no_grad():  # the greedy tokens after the right ones: equal to decoding until the first error
        greedy = model.logits(model(row)).argmax(-1)[0].cpu().numpy()
    wrong = np.flatnonzero(greedy[half - 1 :] != ids[half:])
    return float((wrong[0] if len(wrong) else len(ids) - half) / (len(ids) - half))


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--steps", type=int, default=220, help="at most one epoch"),
            parser.add_argument("--passages", type=int, default=12, help="for each number of repeats"),
            parser.add_argument("--seeds", type=int, default=3),
        ),
        smoke={"steps": 4, "passages": 2},
        quick={"steps": 40, "passages": 3, "seeds": 1},
    )
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text("utf-8", "replace") for path in files]
    pieces = [text[i : i + PIECE] for text in texts for i in range(0, len(text), PIECE)]
    bits: dict[int, list[float]] = {r: [] for r in REPEATS}
    shares: dict[int, list[float]] = {r: [] for r in REPEATS}
    for seed in range(args.seeds):
        rng = np.random.default_rng(seed)
        tokenizer = Tokenizer.train(pieces[:: sized(2, 20)], VOCABULARY)
        planted = {r: [passage(tokenizer, rng) for _ in range(args.passages)] for r in REPEATS}
        copies = [text for r, some in planted.items() for text in some for _ in range(r)]
        # As many pieces as the steps read in addition to the copies: all is read about once.
        n_tokens = args.steps * BATCH * LENGTH - sum(len(tokenizer.encode(text)) + 2 for text in copies)
        chosen, order = list[str](), rng.permutation(len(pieces))
        for i in order[: len(order) - 20]:
            if n_tokens <= 0:
                break
            chosen.append(pieces[i])
            n_tokens -= len(tokenizer.encode(pieces[i])) + 2
        mixed = [*chosen, *copies]
        documents = [document(i, mixed[j]) for i, j in enumerate(rng.permutation(len(mixed)))]
        held_out = [document(1 << 40 | int(i), pieces[i]) for i in order[-20:]]
        with tempfile.TemporaryDirectory() as place:
            write_tokens(tokenizer, Path(place, "tokens"), documents, held_out)
            model, seconds = trained(Path(place, "tokens"), seed, args.steps)
        for r, some in planted.items():
            encoded = [tokenizer.encode_document(text) for text in some]
            n_bytes = sum(len(text) for text in some)
            bits[r].append(round(bits_per_byte(sum(document_nats(model, encoded, LENGTH)), n_bytes), 4))
            shares[r].append(round(float(np.mean([extracted(model, ids) for ids in encoded])), 4))
        print(
            f"seed {seed}, {seconds:.0f} s: bits per byte { {r: b[-1] for r, b in bits.items()} }", flush=True
        )
        print(f"  repeated by greedy decoding { {r: s[-1] for r, s in shares.items()} }", flush=True)
    share = {r: float(np.mean(some)) for r, some in shares.items()}
    claim(
        "Share of a passage that greedy decoding repeats, after four repeats in training", ours=round(share[4], 4),
        peer=round(share[64], 4), peer_name="64 repeats", unit="share of tokens", ratio=share[4] / max(share[64], 1e-9),
        bar=0.2, ok=share[4] <= 0.2 * share[64], quick=args.quick, samples=[{"bits": bits, "extracted": shares}],
    )  # fmt: skip


if __name__ == "__main__":
    main()
