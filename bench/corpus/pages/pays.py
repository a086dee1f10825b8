"""The effect of curation and of the HTML tool: equal models after equal training, on held-out pages.

    python bench/corpus/pages/pays.py [--docs FOLDER] [--peer PYTHON] [--seeds 5] [--steps 120] [--quick] [--save]

FOLDER holds the unpacked packages python3.11-doc and linux-doc-6.1, which have the plain sources of their pages
(`_sources/*.rst.txt`); without it they are fetched. Of a sample of the pages, some are held out by a hash of their name. The
score is bits per byte of the plain sources of these. All models have one shape, one tokenizer (of the sources of the
training pages), the same number of tokens, and per seed the same initial weights. They are trained on these forms of the
other pages:

- raw: the pages as files, with their tags.
- visible: all visible text, as of a WET archive, not filtered.
- main: the main content by resiliparse, not filtered.
- trafilatura: the main content by trafilatura, not filtered (with an interpreter that has it in `--peer`).
- curated: the documents that the recipe `curate-web` selects.
- crawl: the same with the filters c4 and fineweb, which are made for the prose of a crawl.

The first two claims are the share of seeds in which `curated` is ahead of `raw` and of `visible`; the third compares the two
tools for the main content.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse, sized
from bench.corpus.support.debian import MANUALS, unpacked
from bench.corpus.support.training import LENGTH, VOCABULARY, trained, write_tokens

from whorl.corpus import Corpus, CurateConfig, Document, IngestConfig, curate, document_files, ingest
from whorl.evals.likelihood import bits_per_byte, document_nats
from whorl.recipes.recipe import load_recipe
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress

KEEP_ALL = "SELECT row, '' AS reason FROM attributes"
HELD_OUT = 12  # one page of so many
PAGES = sized(800, 60)
READ_BYTES = sized(12_000_000, 500_000)
SCORED_BYTES = sized(400_000, 20_000)
TRAFILATURA = """
import json, sys, trafilatura
for path in json.load(sys.stdin):
    text = trafilatura.extract(open(path, "rb").read(), include_tables=True) or ""
    print(json.dumps({"path": path, "text": text}))
"""


def pages_with_sources(folder: Path) -> dict[Path, Path]:
    """Return page -> its plain source."""
    found = {}
    for sources in sorted(folder.rglob("_sources")):
        for source in sorted(sources.rglob("*.rst.txt")):
            page = sources.parent / source.relative_to(sources).with_suffix("").with_suffix(".html")
            if page.is_file():
                found[page] = source
    return found


def digest(name: str) -> bytes:
    return hashlib.blake2b(name.encode()).digest()


def is_held_out(page: Path) -> bool:
    return digest(page.name)[-1] % HELD_OUT == 0


def first_bytes(documents: Iterable[Document], limit: int) -> Iterator[Document]:
    """Yield documents up to so many bytes: far more than the training reads."""
    for document in documents:
        limit -= document.n_bytes
        if limit < 0:
            return
        yield document


def select(
    sources: Iterable[Path], out: Path, *, formats: Mapping[str, str], settings: Mapping[str, Any]
) -> Corpus:
    """Ingest and curate files; `settings` are those of `curate`."""
    documents, selection = out / "documents", out / "selection"
    documents.mkdir(parents=True)
    selection.mkdir()
    quiet = Progress.silent()
    ingest(IngestConfig(sources=[str(s) for s in sources], formats=dict(formats)), documents, quiet)
    held_out = {"validation_bytes": 20_000, "test_bytes": 0}
    curate(CurateConfig.model_validate({**settings, **held_out}), document_files(documents), selection, quiet)
    return Corpus(documents, selection)


def corpora(pages: Path, texts: Path | None, scratch: Path, quick: bool) -> dict[str, Corpus]:
    """Return every form of the pages below a folder; without `crawl` if `quick`. texts: JSONL of trafilatura."""
    recipe = load_recipe("curate-web")
    keep = {"query": KEEP_ALL, "near_duplicates": "keep"}
    settings = recipe.steps["curate"].config
    curated = settings if isinstance(settings, dict) else settings.model_dump(exclude_unset=True)
    crawl = {**curated, "filters": ["gopher_quality", "gopher_repetition", "c4", "fineweb"]}
    found = {
        "raw": select([pages], scratch / "raw", formats={}, settings=keep),
        "visible": select([pages], scratch / "visible", formats={".html": "html_all"}, settings=keep),
        "main": select([pages], scratch / "main", formats={".html": "html"}, settings=keep),
        "curated": select([pages], scratch / "curated", formats={".html": "html"}, settings=curated),
    }
    if not quick:
        found["crawl"] = select([pages], scratch / "crawl", formats={".html": "html"}, settings=crawl)
    if texts is not None:
        found["trafilatura"] = select([texts], scratch / "trafilatura", formats={}, settings=keep)
    return found


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--docs", type=Path),
            parser.add_argument("--peer", help="interpreter with trafilatura"),
            parser.add_argument("--seeds", type=int, default=5),
            parser.add_argument("--steps", type=int, default=120),
            parser.add_argument(
                "--quick", action="store_true", help="one seed, a sixth of the steps, one manual"
            ),
        ),
        smoke={"seeds": 1, "steps": 4},
    )
    if args.quick:
        args.seeds, args.steps = 1, args.steps // 6
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        pages = pages_with_sources(unpacked(args.docs, MANUALS[: 1 if args.quick else 2], scratch))
        pages = dict(sorted(pages.items(), key=lambda pair: digest(pair[0].name))[:PAGES])
        folder = scratch / "pages"
        folder.mkdir()
        training = [page for page in pages if not is_held_out(page)]
        for page in training:
            (folder / f"{digest(str(page))[:4].hex()}-{page.name}").write_bytes(page.read_bytes())
        texts = scratch / "texts.jsonl" if args.peer else None
        if texts is not None:
            done = subprocess.run(
                [args.peer, "-c", TRAFILATURA], input=json.dumps(sorted(map(str, folder.iterdir()))), text=True,
                stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            texts.write_text(done.stdout)
        tokenizer = Tokenizer.train((pages[page].read_text() for page in training), VOCABULARY)
        held_out, n_bytes = [], 0
        for page in (page for page in pages if is_held_out(page)):
            text = pages[page].read_text()
            if n_bytes + len(text.encode()) < SCORED_BYTES:
                held_out.append(tokenizer.encode_document(text))
                n_bytes += len(text.encode())
        sizes = {}
        for name, corpus in corpora(folder, texts, scratch / "corpora", args.quick).items():
            limit = READ_BYTES // 6 if args.quick else READ_BYTES
            some = (first_bytes(corpus.documents(split), limit) for split in ("train", "validation"))
            split = write_tokens(tokenizer, scratch / f"tokens-{name}", *some).split("train")
            sizes[name] = {"bytes": split.n_bytes, "tokens": len(split)}
        print(
            f"{len(training)} pages for training, {len(held_out)} held out with {n_bytes:,} bytes; {sizes}",
            flush=True,
        )
        bits: dict[str, list[float]] = {name: [] for name in sizes}
        seconds: dict[str, list[float]] = {name: [] for name in sizes}
        for seed in range(args.seeds):
            for name in sizes:
                model, took = trained(scratch / f"tokens-{name}", seed, args.steps)
                score = bits_per_byte(sum(document_nats(model, held_out, LENGTH)), n_bytes)
                bits[name].append(round(score, 4))
                seconds[name].append(round(took, 1))
                print(f"seed {seed}, {name}: {score:.4f} bits per byte after {took:.1f} s", flush=True)
    report(bits, seconds, sizes, args.quick)


def report(
    bits: Mapping[str, list[float]], seconds: Mapping[str, list[float]], sizes: Mapping[str, Any], quick: bool
) -> None:
    """Print the claims."""
    for other in ("raw", "visible"):
        leads = [b - a for a, b in zip(bits["curated"], bits[other], strict=True)]
        ahead = sum(lead > 0 for lead in leads)
        claim(
            f"Seeds of {len(leads)} in which curated pages give fewer bits per byte than {other} ones, equal training",
            ours=round(float(np.mean(bits["curated"])), 4), peer=round(float(np.mean(bits[other])), 4),
            peer_name=f"{other} pages", unit="bits per byte", ratio=ahead / len(leads), bar=1, ok=ahead == len(leads),
            samples=[bits, seconds, sizes], variant=other, quick=quick,
        )  # fmt: skip
    tool = "trafilatura" if "trafilatura" in bits else "visible"
    leads = [b - a for a, b in zip(bits["main"], bits[tool], strict=True)]
    claim(
        "Seeds in which the HTML tool gives fewer bits per byte than another, on the same pages, not filtered",
        ours=round(float(np.mean(bits["main"])), 4), peer=round(float(np.mean(bits[tool])), 4),
        peer_name="trafilatura" if tool == "trafilatura" else "all visible text", unit="bits per byte",
        ratio=sum(lead > 0 for lead in leads) / len(leads), bar=1, ok=all(lead > 0 for lead in leads),
        samples=[bits], variant="tool", quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
