"""`whorl run curate-web` on Debian's documentation, as a folder of pages and as a web archive of them.

    python bench/corpus/pages/web.py [--docs FOLDER] [--save]

FOLDER holds the unpacked packages debian-policy and debian-reference-{de,en,fr,it,ja,zh-cn,zh-tw}; without it they are
fetched with `apt-get download` and unpacked with `dpkg -x`. Claims, from the artifacts of both runs:

- `why` explains every document, rejected record and copied file, and the run ends in a token set and a report. An
  explanation has the rule with its values, the document that stays, or the detail of a rejection.
- The text of the FHS, read from HTML and from PDF, against Debian's text of the same source, as F1 of words.
- The language of the pages of debian-reference, without tags (navigation and code included), and as extracted.

`--smoke` takes debian-policy only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._run import claim, parse, sized
from bench.corpus.support.debian import (
    POLICY,
    REFERENCE,
    body,
    page_files,
    plain,
    reference_pages,
    unpacked,
    word_f1,
    write_warc,
)

from whorl.cli.jobs.corpus_store import selection_query
from whorl.corpus import document_files
from whorl.corpus.measures.language import measure_language
from whorl.corpus.measures.measure import Texts
from whorl.corpus.provenance.explain import explain
from whorl.errors import DataError
from whorl.store import Store

SITE = "https://docs.example/"


def curate_web(source: Path, store: Path) -> dict[str, Any]:
    """Run the recipe, and return its artifacts by step."""
    words = [
        "run",
        "curate-web",
        "--set",
        f"ingest.sources={json.dumps([str(source)])}",
        "--store",
        str(store),
    ]
    done = subprocess.run([sys.executable, "-m", "whorl.cli", *words], text=True, capture_output=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"curate-web failed on {source}:\n{done.stderr[-3000:]}")
    opened = Store(store)
    return {name.rpartition("/")[2]: opened.open(name) for name in opened.names()}


def unexplained(made: dict[str, Any]) -> tuple[int, list[str], Counter[str]]:
    """Return how many documents, records and copies there are, those that `why` does not explain, and the verdicts."""
    documents, selection = made["ingest"].path, made["curate"].path
    query = selection_query(made["curate"])
    ids = [
        i for path in document_files(documents) for i in pq.read_table(path, columns=["id"])["id"].to_pylist()
    ]
    rejected = [json.loads(line) for line in (documents / "quarantine.jsonl").read_text().splitlines()]
    copies_file = documents / "copies.jsonl"
    copied = [json.loads(x) for x in copies_file.read_text().splitlines()] if copies_file.is_file() else []
    references = ids + [f"{r['path']}:{r['offset']}" for r in rejected] + [r["path"] for r in copied]
    verdicts, missing = Counter[str](), []
    for reference in references:
        try:
            found = explain(reference, documents, selection, query=query)
        except DataError as error:
            missing.append(f"{reference}: {error}")
            continue
        verdicts[found.verdict] += 1
        evidence = {
            "kept": bool(found.split and found.measures),
            "dropped": bool(found.reason and ((found.condition and found.values) or found.duplicate)),
            "quarantined": bool(found.reason and found.detail),
            "copy of a file": bool(found.duplicate),
        }
        if not evidence.get(found.verdict):
            missing.append(f"{reference}: {found.verdict} {found.reason}")
    return len(references), missing, verdicts


def texts_of(made: dict[str, Any]) -> dict[str, str]:
    """Return the text of each document by its URL, or its path if it has none."""
    tables = [
        pq.read_table(path, columns=["path", "url", "text"]) for path in document_files(made["ingest"].path)
    ]
    rows = [row for table in tables for row in table.to_pylist()]
    return {(row["url"] or row["path"]).removeprefix(SITE): row["text"] for row in rows}


def claim_run(made: dict[str, Any], kind: str, same: bool) -> None:
    """Claim the explanations of a run; `same`: its pages have the texts of the other's."""
    total, missing, verdicts = unexplained(made)
    print(f"{kind}: {dict(verdicts)}; without an explanation: {missing}")
    complete = all(
        (made[step].path / name).exists() for step, name in (("tokens", ""), ("report", "report.html"))
    )
    claim(
        f"`why` explains every document of curate-web on {kind}, which ends in tokens and a report",
        ours=total - len(missing), peer=total, peer_name="all documents, records and copies", unit="documents",
        ratio=1 - len(missing) / total, bar=1, ok=complete and same and not missing, variant=kind.split()[-1],
        samples=[dict(verdicts), {"tokens": made["tokens"].summary["splits"]["train"]["tokens"]}],
    )  # fmt: skip


def claim_languages(folder: Path, extracted: dict[str, str]) -> None:
    pages = reference_pages(folder)
    wrong = {}
    for kind, texts in (
        ("all text", [plain(path) for path in pages.values()]),
        ("main content", [extracted[str(path.relative_to(folder))] for path in pages.values()]),
    ):
        found = measure_language(Texts(texts))["text_language"]
        wrong[kind] = [
            f"{chapter}.{language}: {got}"
            for (chapter, language), got in zip(pages, found, strict=True)
            if got != language[:2]
        ]
    most = max(map(len, wrong.values()))
    claim(
        "The language of Debian's reference pages in de, en, fr, it, ja and zh is identified",
        ours=len(pages) - most, peer=len(pages), peer_name="all pages", unit="pages", ratio=1 - most / len(pages),
        bar=0.98, ok=1 - most / len(pages) >= 0.98, samples=[wrong], variant="language",
    )  # fmt: skip


def main() -> None:
    args = parse(__doc__, lambda parser: parser.add_argument("--docs", type=Path))
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        folder = unpacked(args.docs, sized((*POLICY, *REFERENCE), POLICY), scratch)
        pages = {str(path.relative_to(folder)): body(path) for path in page_files(folder)}
        archive = scratch / "pages.warc.gz"
        write_warc({SITE + name: data for name, data in pages.items()}, archive)
        from_folder = curate_web(folder, scratch / "folder-store")
        from_archive = curate_web(archive, scratch / "archive-store")
        texts, archived = texts_of(from_folder), texts_of(from_archive)
        differing = [name for name in pages if archived.get(name) != texts.get(name)]
        print(f"of {len(pages)} pages, these have another text from the archive: {differing}")
        claim_run(from_folder, "a folder", not differing)
        claim_run(from_archive, "an archive", not differing)
        name = next(name for name in pages if name.endswith("fhs-3.0.html"))
        reference = body(folder / name.replace(".html", ".txt.gz")).decode()
        for kind, file, bar in (("HTML", name, 0.95), ("PDF", name.replace(".html", ".pdf.gz"), 0.9)):
            scores = [word_f1(found[file], reference) for found in (texts, archived)]
            claim(
                f"Words of the FHS in {kind} by curate-web, against the text of the same source, folder and archive",
                ours=round(min(scores), 4), peer=1, peer_name="the text", unit="F1", ratio=min(scores), bar=bar,
                ok=min(scores) >= bar, variant=kind.lower(), samples=[round(score, 4) for score in scores],
            )  # fmt: skip
        if reference_pages(folder):
            claim_languages(folder, texts)


if __name__ == "__main__":
    main()
