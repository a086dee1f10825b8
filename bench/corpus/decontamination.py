"""Decontamination: recall and precision on planted test items, and MB/s.

    python bench/corpus/decontamination.py [--items 1000] [--save]

The corpus is the standard library's sources, divided into documents of about 4 kB. The test items are the questions of
GSM8K's test set with 13 words or more (folder WHORL_DATA; without it, random sentences). The first `--items` are planted, a
quarter of them in each form: verbatim, re-wrapped at eight words, in capitals, inside longer paragraphs. The others are not.
Precision is over documents: those with a planted item among those marked. The peer is a search of plain Python for tuples of
words, on a part of the corpus.
"""

from __future__ import annotations

import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import pyarrow as pa
import pyarrow.parquet as pq
from bench._run import claim, parse

from whorl.corpus.decontamination.items import ItemIndex, TestItem
from whorl.corpus.decontamination.match import find_contamination
from whorl.corpus.decontamination.words import split_words

FORMS = ("verbatim", "wrapped", "capitals", "embedded")
DOCUMENT_CHARACTERS = 4000


def documents() -> list[str]:
    """Pieces of the standard library's sources."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    texts = [f.read_text(errors="replace") for f in files if "site-packages" not in f.parts]
    return [t[i : i + DOCUMENT_CHARACTERS] for t in texts for i in range(0, len(t), DOCUMENT_CHARACTERS)]


def questions(n: int) -> list[str]:
    """Questions of 13 words or more, up to n."""
    folder = Path(os.environ.get("WHORL_DATA", Path(__file__).parents[3] / "shared" / "data"))
    path, rng = folder / "gsm8k_test.jsonl", random.Random(0)
    if path.is_file():
        found = [json.loads(line)["question"] for line in path.read_text().splitlines()]
    else:
        words = ["".join(rng.choices("abcdefghij", k=6)) for _ in range(3000)]
        found = [" ".join(rng.choices(words, k=rng.randint(13, 60))) for _ in range(n)]
    return [text for text in found if len(split_words(text)) >= 13][:n]


def planted(form: str, item: str, document: str) -> str:
    """The document with the item in one of the forms."""
    words, half = item.split(), len(document) // 2
    text = {
        "wrapped": "\n".join(" ".join(words[i : i + 8]) for i in range(0, len(words), 8)),
        "capitals": item.upper(),
    }.get(form, item)
    between = " " if form == "embedded" else "\n"
    return f"{document[:half]}{between}{text}{between}{document[half:]}"


def python_search(texts: list[str], items: list[str]) -> float:
    """MB/s of a search for tuples of words in plain Python."""
    grams = {tuple(w[i : i + 13]) for w in map(split_words, items) for i in range(len(w) - 12)}
    begin, hits = time.perf_counter(), 0
    for text in texts:
        words = split_words(text)
        hits += any(tuple(words[i : i + 13]) in grams for i in range(len(words) - 12))
    return sum(map(len, texts)) / 1e6 / (time.perf_counter() - begin)


def main() -> None:
    args = parse(
        __doc__, lambda parser: parser.add_argument("--items", type=int, default=1000), smoke={"items": 80}
    )
    rng = random.Random(0)
    items = questions(2 * args.items)
    n = min(args.items, len(items))
    texts = documents()[: 20 * args.items]
    rows = rng.sample(range(len(texts)), n)
    for i, row in enumerate(rows):
        texts[row] = planted(FORMS[i % 4], items[i], texts[row])
    index = ItemIndex.build(TestItem("test", str(i), text) for i, text in enumerate(items))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "documents.parquet")
        pq.write_table(pa.table({"text": texts}), path, row_group_size=1000)
        begin = time.perf_counter()
        found = find_contamination([path], index)
        rate = sum(map(len, texts)) / 1e6 / (time.perf_counter() - begin)
    marked = {match.row: match.item for match in found}
    recalls = {}
    for k, form in enumerate(FORMS):
        of_form = list(range(k, n, 4))
        recalls[form] = sum(marked.get(rows[i]) == i for i in of_form) / len(of_form)
    precision = len(set(rows) & set(marked)) / max(1, len(marked))
    peer = python_search(texts[:500], items)
    samples = [{"form": form, "recall": recall} for form, recall in recalls.items()]
    claim(
        "Planted test items are found: the lowest recall of four forms",
        ours=min(recalls.values()), peer=0.95, peer_name="target", unit="recall", ratio=min(recalls.values()),
        bar=0.95, ok=min(recalls.values()) >= 0.95, samples=samples, variant="recall",
    )  # fmt: skip
    claim(
        "Marked documents hold a planted test item",
        ours=precision, peer=0.99, peer_name="target", unit="precision", ratio=precision, bar=0.99,
        ok=precision >= 0.99, samples=[len(marked), n], variant="precision",
    )  # fmt: skip
    claim(
        "The search for test items in one process is faster than plain Python",
        ours=round(rate, 1), peer=round(peer, 2), peer_name="plain Python", unit="MB/s", ratio=rate / peer,
        bar=5.0, ok=rate / peer >= 5, samples=[round(rate, 1)], variant="rate",
    )  # fmt: skip


if __name__ == "__main__":
    main()
