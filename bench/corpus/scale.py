"""Time and memory of ingest and curate at three sizes: JSONL to a selection, with all filters, without near duplicates.

    python bench/corpus/scale.py [--gigabytes 0.1 1 10] [--short 2000000] [--equal 1000000] [--workers 2] [--save]
        [--folder SCRATCH]

Documents have about 450 words of a Zipf distribution over made-up words and English function words, in lines and sentences.
One of ten is a copy of an earlier one with a few other words. Files of 100 MB are made in the scratch folder, which needs
about three times the largest size. The settings are those of the recipe `curate-web`. Two further corpora have
documents of 12 words, all different or all equal, of which only near duplicates are removed.

The time is linear if the CPU time per byte, of all processes, of each size is at most 1.2 times that of the size before.
Memory is that of all processes together, without the pages of mapped files.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from bench.corpus.support.processes import start

FILE_BYTES = 100_000_000
KEEP_ALL = "SELECT row, '' AS reason FROM attributes"
WORDS = 450
FUNCTION_WORDS = (
    "the", "be", "to", "of", "and", "that", "have", "with", "a", "in", "is", "it", "for", "on", "as", "was",
)  # fmt: skip
OWN = """
import json, sys, time
from pathlib import Path
from whorl.corpus import CurateConfig, IngestConfig, curate, document_files, ingest
from whorl.recipes.recipe import load_recipe
from whorl.tracking.progress import Progress

def main():
    data, out, workers, query = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    documents, selection, quiet = out / "documents", out / "selection", Progress.silent()
    documents.mkdir(parents=True)
    selection.mkdir()
    begin = time.perf_counter()
    ingest(IngestConfig(sources=[data]), documents, quiet, workers=workers)
    read = time.perf_counter()
    settings = load_recipe("curate-web").steps["curate"].config
    if query:
        settings = CurateConfig(query=query, validation_bytes=0, test_bytes=0)
    found = curate(settings, document_files(documents), selection, quiet, workers=workers)
    end = time.perf_counter()
    size = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    print(json.dumps({"ingest": round(read - begin, 2), "curate": round(end - read, 2), "disk": size,
                      "documents": found["funnel"][0]["documents"],
                      "dropped": {k: v["documents"] for k, v in found["dropped"].items()}}))

if __name__ == "__main__":
    main()
"""


def write_documents(folder: Path, n_bytes: float) -> int:
    """Write files of JSONL, and return their size in bytes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnoprstuvw"))
    made = {"".join(rng.choice(letters, rng.integers(3, 10))) for _ in range(40_000)}
    vocabulary = np.array([*FUNCTION_WORDS, *sorted(made)])
    written, number, recent = 0, 0, list[np.ndarray]()
    while written < n_bytes:
        size = 0
        with (folder / f"{number:05d}.jsonl").open("w", encoding="utf-8") as out:
            while size < min(FILE_BYTES, n_bytes - written):
                for ids in rng.zipf(1.25, (500, WORDS)) % len(vocabulary):
                    if recent and rng.random() < 0.1:
                        ids = recent[int(rng.integers(len(recent)))].copy()
                        ids[rng.integers(0, WORDS, 3)] = rng.integers(0, len(vocabulary), 3)
                    elif rng.random() < 0.05:
                        recent = [*recent[-2000:], ids]
                    words = vocabulary[ids]
                    lines = [" ".join(words[i : i + 15]).capitalize() + "." for i in range(0, WORDS, 15)]
                    size += out.write(json.dumps({"text": "\n".join(lines)}) + "\n")
        written += size
        number += 1
    return written


def write_short(folder: Path, n: int, equal: bool) -> int:
    """Write n documents of 12 words into one file, and return its size in bytes."""
    folder.mkdir()
    with (folder / "short.jsonl").open("w", encoding="utf-8") as out:
        for number in range(n):
            word = "word" if equal else f"{number:x}"
            out.write(json.dumps({"text": " ".join(f"{word}{place}" for place in range(12))}) + "\n")
    return (folder / "short.jsonl").stat().st_size


def measured(scratch: Path, n_bytes: int, workers: int, query: str = "") -> dict[str, Any]:
    """Return the figures of one corpus in `scratch`/data, and remove it."""
    command = [sys.executable, "-c", OWN, str(scratch / "data"), str(scratch / "out"), str(workers), query]
    found = {"bytes": n_bytes, **start(command, 0.05)}
    print(found, flush=True)
    shutil.rmtree(scratch / "data")
    shutil.rmtree(scratch / "out")
    return found


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument(
                "--gigabytes", type=float, nargs="+", default=[0.1, 1.0, 10.0], help="0: none"
            ),
            parser.add_argument("--short", type=int, default=2_000_000, help="different documents; 0: none"),
            parser.add_argument("--equal", type=int, default=1_000_000, help="equal documents; 0: none"),
            parser.add_argument("--workers", type=int, default=2),
            parser.add_argument(
                "--quick", action="store_true", help="0.01 and 0.03 GB, 50,000 short documents"
            ),
            parser.add_argument("--folder", type=Path, help="scratch folder; default a temporary one"),
        ),
        smoke={"gigabytes": [0.002, 0.004], "short": 2000, "equal": 1000},
    )
    if args.quick:
        args.gigabytes, args.short, args.equal = [0.01, 0.03], 50_000, 50_000
    found = []
    with tempfile.TemporaryDirectory(dir=args.folder) as place:
        scratch = Path(place)
        for size in filter(None, args.gigabytes):
            n_bytes = write_documents(scratch / "data", size * 1e9)
            found.append(measured(scratch, n_bytes, args.workers))
        for name, n in (("different", args.short), ("equal", args.equal)):
            if n:
                short = measured(
                    scratch, write_short(scratch / "data", n, name == "equal"), args.workers, KEEP_ALL
                )
                claim_memory(f"{n:,} {name} documents of 12 words", name, [short], args.quick)
    if not found:
        return
    rates = [f["cpu_seconds"] / f["bytes"] * 1e9 for f in found]
    growth = max((b / a for a, b in itertools.pairwise(rates)), default=1.0)
    claim(
        f"CPU time per GB of ingest and curate at {', '.join(f'{g:g}' for g in args.gigabytes)} GB, largest growth",
        ours=round(rates[-1], 1), peer=round(rates[0], 1), peer_name="the smallest size", unit="s/GB", ratio=growth,
        bar=1.2, ok=growth <= 1.2, variant="linear", samples=found, quick=args.quick,
    )  # fmt: skip
    claim_memory(f"{args.gigabytes[-1]:g} GB", "memory", found, args.quick)


def claim_memory(what: str, variant: str, found: list[dict[str, Any]], quick: bool) -> None:
    """Print the claim for the last of these figures."""
    peak = found[-1]["anonymous"] / 2**30
    claim(
        f"Peak memory of ingest and curate at {what}, of all processes", ours=round(peak, 3), peer=2,
        peer_name="the limit", unit="GiB", ratio=peak, bar=2, ok=peak <= 2, variant=variant,
        samples=[{"resident": f["peak"], "anonymous": f["anonymous"], "bytes": f["bytes"]} for f in found], quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
