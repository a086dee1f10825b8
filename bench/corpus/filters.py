"""All filters together (Gopher, C4, FineWeb, language) against datatrove's Gopher quality filter alone.

    python bench/corpus/filters.py --peer PYTHON [--pages FOLDER] [--documents 1000] [--rounds 3] [--save]

One process each, in documents/s; datatrove with its default tokenizer for English (spaCy), and with words separated by white
space. With the same words, verdicts of both Gopher filters are compared. Documents are pieces of 3,000 characters of the
standard library's sources and, with `--pages`, of Debian's `debian-reference` in six languages:

    apt-get download debian-reference-{de,en,fr,it,ja,zh-cn,zh-tw}; dpkg -x each into FOLDER

These pages are also the test of the language measure. Exits with 77 if datatrove is not installed in PYTHON.
"""

from __future__ import annotations

import html
import json
import re
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

from whorl.corpus.measures import FILTERS, Texts, measure_texts
from whorl.corpus.measures.language import measure_language
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


def plain(page: Path) -> str:
    text = re.sub(r"(?s)<(script|style).*?</\1>", "", page.read_text("utf-8"))
    return html.unescape(re.sub(r"<[^>]+>", " ", text))


def read_pages(folder: Path) -> dict[tuple[str, str], str]:
    """Return (chapter, language) -> text."""
    found = {}
    for path in sorted(folder.rglob("*.html")):
        if match := re.fullmatch(r"(.+)\.([a-z-]+)\.html", path.name):
            found[match[1], match[2]] = plain(path)
    return found


def ours(texts: list[str]) -> float:
    """Seconds of all measures, in batches of 500."""
    begin = time.perf_counter()
    for i in range(0, len(texts), 500):
        batch = Texts(texts[i : i + 500])
        measure_rules(batch)
        measure_language(batch)
    return time.perf_counter() - begin


def claim_language(pages: dict[tuple[str, str], str]) -> None:
    found = measure_language(Texts(list(pages.values())))["text_language"]
    wrong = {key: got for key, got in zip(pages, found, strict=True) if got != key[1][:2]}
    right = len(pages) - len(wrong)
    print(f"wrong: {wrong}")
    claim(
        "The language of Debian's reference pages in de, en, fr, it, ja and zh is identified",
        ours=right, peer=len(pages), peer_name="all pages", unit="pages", ratio=right / len(pages), bar=0.98,
        ok=right / len(pages) >= 0.98, samples=[f"{a}.{b}: {c}" for (a, b), c in wrong.items()], variant="language",
    )  # fmt: skip


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
    pages = read_pages(args.pages) if args.pages else {}
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    whole = [*(p.read_text("utf-8", "replace") for p in files), *pages.values()]
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
    if pages:
        claim_language(pages)
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
