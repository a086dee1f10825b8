"""An exported model in llama.cpp: logits, greedy ids and bits per byte compared with Whorl's, from one GGUF file.

    python bench/models/gguf_export.py [--quick]     (needs `gguf` and `llama-cpp-python`)

A tokenizer and a small model (Qwen3's architecture, 4 layers) are trained on the standard library for some minutes, so
that the logits are not noise. The model is exported in three dtypes, and llama.cpp reads each file on the CPU with a
cache in full precision. Bar: in fp32, bits per byte of held-out source within 1e-4 of Whorl's, relatively, and equal
greedy ids.

Also printed: the share of Whorl's tokens that llama.cpp finds in several kinds of text, with three pre-tokenizer names.
GGUF has no name for Whorl's pre-tokenizer pattern; the bits per byte of llama.cpp's ids show the cost.
--quick: fewer steps, fewer texts.
"""

from __future__ import annotations

import itertools
import json
import math
import random
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.models.exchange.gguf_file import export_gguf
from whorl.models.exchange.gguf_vocabulary import read_vocabulary
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig
from whorl.tokens.tokenizer import Tokenizer

QUICK = "--quick" in sys.argv
STEPS, ROWS, LENGTH, VOCAB = (60 if QUICK else 400), 8, 256, 4096
CONTEXT, BYTES = 1024, 2000  # of llama.cpp; of each scored document
WORLD = (
    "Füße über Ägypten, naïve café — “quoted”… el niño habló; łódź, čeština. Немного кириллицы: мама мыла раму. "
    "日本語のテキストと漢字。 한국어 문장. ελληνικά γράμματα, עברית, العربية ٣٤٥. 👩‍🔬 → ≤ ∑ € 12 %\n"
)


def texts() -> tuple[list[bytes], dict[str, list[str]]]:
    """(training texts, held-out texts by kind)."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    random.Random(0).shuffle(files)
    held = [f.read_text(encoding="utf-8", errors="replace") for f in files[-(4 if QUICK else 12) :]]
    numbers = random.Random(1)
    kinds = {
        "Python source": held,
        "prose": [text for _, text in sorted(topics.items())[: 5 if QUICK else 20]],
        "numbers": ["\n".join(f"{numbers.uniform(0, 10 ** (i % 9)):.4f} in {1900 + i}" for i in range(120))],
        "other scripts": [WORLD],
    }
    return [f.read_bytes() for f in files[:80]], kinds


def trained(tokenizer: Tokenizer, texts: list[bytes]) -> Transformer:
    """A small model trained on `texts`."""
    heads = AttentionConfig(n_heads=6, n_kv_heads=2, head_dim=32, qk_norm=True)
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, d_model=192, n_layers=4, max_length=2048, mixers={"full": heads}, mlp_hidden=512,
        tie_embeddings=True,
    )  # fmt: skip
    model = Transformer(config, torch.Generator().manual_seed(0))
    ids = torch.from_numpy(np.concatenate([tokenizer.encode_document(d) for d in texts]).astype(np.int64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    draw = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        starts = torch.randint(0, len(ids) - LENGTH - 1, (ROWS,), generator=draw)
        rows = torch.stack([ids[s : s + LENGTH + 1] for s in starts.tolist()])
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, step / 20, (STEPS - step) / (STEPS / 2))
        loss = F.cross_entropy(model.logits(model(rows[:, :-1])).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"trained: {STEPS} steps, loss {loss.item():.3f} nats per token")
    return model.eval()


class LlamaCpp:
    """llama.cpp over one file: one thread, full precision."""

    def __init__(self, file: Path) -> None:
        import llama_cpp

        self.library: Any = llama_cpp.Llama(
            str(file), n_ctx=CONTEXT, logits_all=True, type_k=0, type_v=0, flash_attn=False, n_threads=1,
            n_threads_batch=1, verbose=False,
        )  # fmt: skip

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[T] ids -> [T, vocab]."""
        self.library.reset()
        self.library.eval(list(ids))
        return torch.from_numpy(self.library.scores[: len(ids)].copy())

    def ids(self, text: str) -> list[int]:
        """llama.cpp's ids of a text."""
        found: list[int] = self.library.tokenize(text.encode(), add_bos=False, special=False)
        return found


def bits(logits: Any, tokenizer: Tokenizer, documents: Sequence[Sequence[int]]) -> float:
    """Bits per byte of documents that follow bos."""
    nats = n_bytes = 0.0
    for ids in documents:
        row = [tokenizer.bos_id, *ids]
        nats += F.cross_entropy(logits(row)[:-1], torch.tensor(row[1:]), reduction="sum").item()
        n_bytes += len(tokenizer.decode(row[1:]))
    return nats / math.log(2) / n_bytes


def spans(tokenizer: Tokenizer, ids: Sequence[int]) -> set[tuple[int, int]]:
    """(start, end) of each token, in bytes."""
    ends = np.cumsum([0, *(len(tokenizer.token_bytes[i]) for i in ids)]).tolist()
    return set(itertools.pairwise(ends))


def agreement(tokenizer: Tokenizer, folder: Path, kinds: dict[str, list[str]]) -> None:
    """Print the share of Whorl's tokens that llama.cpp finds."""
    import gguf
    import llama_cpp

    vocabulary = read_vocabulary(folder, tokenizer.vocab_size)
    in_order = sorted(vocabulary.merges, key={m: n for n, m in enumerate(_listed(folder))}.__getitem__)
    for name, merges in [
        (vocabulary.pre, vocabulary.merges), (vocabulary.pre, in_order), ("llama-bpe", in_order), ("gpt-2", in_order),
    ]:  # fmt: skip
        vocabulary.pre, vocabulary.merges = name, merges
        writer = gguf.GGUFWriter(folder / "v.gguf", "llama")
        vocabulary.add_to(writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        engine: Any = llama_cpp.Llama(str(folder / "v.gguf"), vocab_only=True, verbose=False)
        shares = []
        for kind, given in kinds.items():
            same = total = 0
            for text in given:
                ours = spans(tokenizer, tokenizer.encode(text).tolist())
                found = engine.tokenize(text.encode(), add_bos=False, special=False)
                assert tokenizer.decode(found) == text.encode()
                same, total = same + len(ours & spans(tokenizer, found)), total + len(ours)
            shares.append(f"{kind} {100 * same / total:.1f} %")
        order = "merges as trained" if merges is in_order else "punctuation merges first"
        print(f"  {name}, {order}: {', '.join(shares)}")


def _listed(folder: Path) -> list[str]:
    return [" ".join(pair) for pair in json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]]


def main() -> None:
    parse(__doc__, lambda p: p.add_argument("--quick", action="store_true"))
    if not (find_spec("llama_cpp") and find_spec("gguf")):
        print("skipped: needs llama_cpp and gguf (pip install llama-cpp-python gguf)")
        sys.exit(77)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    training, kinds = texts()
    held = [text[:BYTES] for text in kinds["Python source"]]
    with tempfile.TemporaryDirectory() as name, torch.no_grad():
        folder = Path(name)
        tokenizer = Tokenizer.train(training, VOCAB, workers=1)
        tokenizer.save(folder)
        with torch.enable_grad():
            model = trained(tokenizer, training)

        def own(ids: Sequence[int]) -> torch.Tensor:
            logits: torch.Tensor = model.logits(model(torch.tensor([list(ids)])))[0]
            return logits

        ids = [tokenizer.encode(text).tolist() for text in held]
        prompt = [tokenizer.bos_id, *ids[0][:24]]
        ours, greedy = bits(own, tokenizer, ids), continued(own, prompt)
        samples = []
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            file = folder / f"{dtype}.gguf".removeprefix("torch.")
            export_gguf(model, file, source=folder, dtype=dtype)
            engine = LlamaCpp(file)
            found = bits(engine.logits, tokenizer, ids)
            row = [tokenizer.bos_id, *ids[0]]
            difference = (engine.logits(row) - own(row)).abs().max().item()
            same = sum(a == b for a, b in zip(continued(engine.logits, prompt), greedy, strict=True))
            samples.append((str(dtype), round(found, 6), round(difference, 6), same))
            print(
                f"{dtype}: {found:.6f} bits per byte (ours {ours:.6f}), logits differ by at most {difference:.2g}, "
                f"{same} of {len(greedy)} greedy ids equal, {file.stat().st_size / 1e6:.1f} MB"
            )
            if dtype == torch.float32:
                peer, greedy_same = found, same
                by_its_ids = bits(engine.logits, tokenizer, [engine.ids(text) for text in held])
                print(f"  with llama.cpp's ids: {by_its_ids:.6f}, {100 * (by_its_ids / found - 1):+.2f} %")
        print("share of Whorl's tokens that llama.cpp finds:")
        agreement(tokenizer, folder, kinds)
    error = abs(peer / ours - 1)
    claim(
        "bits per byte of an exported model, relative difference", ours=ours, peer=peer, unit="bits per byte",
        ratio=error, bar=1e-4, ok=error <= 1e-4 and greedy_same == len(greedy), samples=samples, quick=QUICK,
        peer_name="llama.cpp",
    )  # fmt: skip


def continued(logits: Any, prompt: Sequence[int], n: int = 48) -> list[int]:
    """Greedy continuation by `n` ids."""
    ids = list(prompt)
    for _ in range(n):
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


if __name__ == "__main__":
    main()
