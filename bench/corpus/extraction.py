"""HTML extraction in pages/s against trafilatura, with the word F1 of each against the text of the same source.

    python bench/corpus/extraction.py --docs FOLDER --peer PYTHON [--save]

FOLDER holds unpacked documentation of Debian, at least that of debian-policy: `apt-get download debian-policy`, then
`dpkg -x debian-policy*.deb FOLDER`. PYTHON is an interpreter with trafilatura. The pages are the HTML files below FOLDER.
The reference is the text of the FHS, and the F1 of its PDF is printed. Without these options there is no figure.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.corpus.support.debian import word_f1

from whorl.data.extraction import extract

PEER = """
import json, sys, time
import trafilatura
texts, pages = [], [open(path, "rb").read() for path in json.load(sys.stdin)]
trafilatura.extract(pages[0])
start = time.perf_counter()
for page in pages:
    texts.append(trafilatura.extract(page) or "")
print(json.dumps([time.perf_counter() - start, texts[0]]))
"""


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--docs", type=Path),
            parser.add_argument("--peer"),
        ),
    )
    if args.docs is None or args.peer is None:
        print("--docs and --peer are needed")
        sys.exit(77)
    fhs = next(args.docs.rglob("fhs-3.0.html"))
    reference = gzip.decompress(fhs.with_suffix(".txt.gz").read_bytes()).decode()
    paths = [fhs, *sorted(p for p in args.docs.rglob("*.html") if p.is_file() and p != fhs)]
    pages = [path.read_bytes() for path in paths]
    extract(pages[0], "text/html")
    start = time.perf_counter()
    texts = [extract(page, "text/html").text for page in pages]
    ours = len(pages) / (time.perf_counter() - start)
    done = subprocess.run(
        [args.peer, "-c", PEER],
        input=json.dumps([str(p) for p in paths]),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, peer_text = json.loads(done.stdout)
    pdf = extract(gzip.decompress(fhs.with_suffix(".pdf.gz").read_bytes()), "application/pdf").text
    scores = {
        "html": word_f1(texts[0], reference), "trafilatura": word_f1(peer_text, reference), "pdf": word_f1(pdf, reference),
    }  # fmt: skip
    print(f"{len(pages)} pages; word F1 {scores}")
    peer = len(pages) / seconds
    claim(
        "HTML pages as text against trafilatura, word F1 of the FHS no lower", ours=round(ours, 1),
        peer=round(peer, 1), peer_name="trafilatura", unit="pages/s", ratio=ours / peer, bar=5,
        ok=ours >= 5 * peer and scores["html"] >= max(0.95, scores["trafilatura"]) and scores["pdf"] >= 0.9,
        samples=[{k: round(v, 4) for k, v in scores.items()}]
    )  # fmt: skip


if __name__ == "__main__":
    main()
