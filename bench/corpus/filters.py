"""All filters together (Gopher, C4, FineWeb, language) against datatrove's Gopher quality filter alone.

    python bench/corpus/filters.py --peer PYTHON [--pages FOLDER] [--documents 1000] [--rounds 3] [--save]

One process each, in documents/s; datatrove with its default tokenizer for English (spaCy), and with words separated by white
space. With the same words, verdicts of both Gopher filters are compared. Documents are pieces of 3,000 characters of the
standard library's sources and, with `--pages`, of Debian's `debian-reference` in six languages:

    apt-get download debian-reference-{de,en,fr,it,ja,zh-cn,zh-tw}; dpkg -x each into FOLDER

Exits with 77 if datatrove is not installed in PYTHON.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.corpus.support.debian import plain, reference_pages

from whorl.corpus.measures.filters import FILTERS
from whorl.corpus.measures.language import measure_language
from whorl.corpus.measures.measure import Texts, measure_texts
from whorl.corpus.measures.rules import measure_rules

PIECE = 3000
PEER = """
import json, sys, time
from datatrove.data import Document
from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
from datatrove.utils.word_tokenizers import WordTokenizer

class Spaces(WordTokenizer):
    def word_tokenize(self, text):
        return text.split()
    def sent_tokenize(self, text):
        return [text]
    def span_tokenize(self, text):
        return [(0, len(text))]

def verdict(chosen, text):
    try:
        found = chosen.filter(Document(text=text, id=""))
    except ZeroDivisionError:
        return False
    return found is True

texts = json.load(open(sys.argv[1]))
GopherQualityFilter().filter(Document(text=texts[0], id=""))
found = {}
for name, chosen in (("default", GopherQualityFilter()), ("quality", GopherQualityFilter(language=Spaces())),
                     ("repetition", GopherRepetitionFilter(language=Spaces()))):
    begin = time.perf_counter()
    found[name] = [verdict(chosen, text) for text in texts]
    found["seconds_" + name] = time.perf_counter() - begin
print(json.dumps(found))
"""


def ours(texts: list[str]) -> float:
    """Seconds of all measures, in batches of 500."""
    begin = time.perf_counter()
    for i in range(0, len(texts), 500):
        batch = Texts(texts[i : i + 500])
        measure_rules(batch)
        measure_language(batch)
    return time.perf_counter() - begin


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument(
                "--peer", default=sys.executable, help="interpreter with datatrove and spaCy"
            ),
            parser.add_argument("--pages", type=Path, help="folder of the unpacked pages"),
            parser.add_argument("--documents", type=int, default=1000),
            parser.add_argument("--rounds", type=int, default=3),
        ),
        smoke={"documents": 50, "rounds": 1},
    )
    look = "import datatrove, spacy"
    if subprocess.run([args.peer, "-c", look], stderr=subprocess.DEVNULL).returncode:
        print(f"datatrove or spaCy is not installed in {args.peer}")
        sys.exit(77)
    pages = [plain(path) for path in reference_pages(args.pages).values()] if args.pages else []
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    whole = [*(p.read_text("utf-8", "replace") for p in files), *pages]
    pieces = [text[i : i + PIECE] for text in whole for i in range(0, len(text), PIECE)]
    texts = pieces[:: max(1, len(pieces) // args.documents)][: args.documents]
    ours(texts[:50])
    rounds: list[tuple[float, dict[str, Any]]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "texts.json")
        data.write_text(json.dumps(texts))
        for _ in range(args.rounds):
            printed = subprocess.run(
                [args.peer, "-c", PEER, str(data)], stdout=subprocess.PIPE, check=True
            ).stdout
            rounds.append((ours(texts), json.loads(printed.splitlines()[-1])))
    columns = measure_texts("rules", texts)
    peer = rounds[0][1]
    for name in ("quality", "repetition"):
        kept = [not FILTERS[f"gopher_{name}"].reason(row) for row in columns]
        same = [a == b for a, b in zip(kept, peer[name], strict=True)]
        print(
            f"{name}: kept {sum(kept)} of {len(texts)}, differing at {[i for i, s in enumerate(same) if not s][:20]}"
        )
        claim(
            f"Verdicts of the Gopher {name} filter equal datatrove's on the same words",
            ours=sum(same), peer=len(texts), peer_name="documents", unit="documents", ratio=sum(same) / len(texts),
            bar=0.99, ok=sum(same) / len(texts) >= 0.99, variant=f"verdicts_{name}",
        )  # fmt: skip
    for tokenizer, variant in (("quality", "spaces"), ("default", "")):
        ratio = statistics.median(other[f"seconds_{tokenizer}"] / own for own, other in rounds)
        words = "words by spaCy, its default" if variant == "" else "words by white space"
        claim(
            f"All filters together, against datatrove's Gopher quality filter alone ({words})",
            ours=round(len(texts) / statistics.median(own for own, _ in rounds), 1),
            peer=round(len(texts) / statistics.median(o[f"seconds_{tokenizer}"] for _, o in rounds), 1),
            peer_name="datatrove", unit="documents/s", ratio=ratio, bar=20 if variant == "" else 1, variant=variant,
            ok=ratio >= (20 if variant == "" else 1),
            samples=[[round(own, 3), round(other[f"seconds_{tokenizer}"], 3)] for own, other in rounds],
        )  # fmt: skip


if __name__ == "__main__":
    main()
