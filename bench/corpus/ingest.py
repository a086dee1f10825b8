"""Ingest of JSONL in MB/s: two processes against one, on the same files, with the same bytes as the result.

    python bench/corpus/ingest.py [--megabytes 400] [--rounds 3] [--save]

The text is the standard library's, one record per file, repeated with a number in each record. Rounds alternate, and the
figure is the median of their ratios. Two processes need about a second to start, which is part of the time.
"""

from __future__ import annotations

import json
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

from whorl.corpus import IngestConfig, ingest
from whorl.tracking.progress import Progress


def write_records(path: Path, megabytes: float) -> None:
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    n = 0
    with path.open("w", encoding="utf-8") as out:
        while out.tell() < megabytes * 1e6:
            for text in texts:
                out.write(json.dumps({"text": f"# {n}\n{text}"}) + "\n")
                n += 1


def seconds(data: Path, workers: int) -> tuple[float, Any]:
    with tempfile.TemporaryDirectory() as out:
        begin = time.perf_counter()
        found = ingest(IngestConfig(sources=[str(data)]), Path(out), Progress.silent(), workers=workers)
        return time.perf_counter() - begin, (
            found,
            [p.read_bytes()[-2000:] for p in sorted(Path(out).iterdir())],
        )


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--megabytes", type=float, default=400),
            parser.add_argument("--rounds", type=int, default=3),
        ),
        smoke={"megabytes": 10, "rounds": 1},
    )
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "records.jsonl")
        write_records(data, args.megabytes)
        size = data.stat().st_size / 1e6
        rounds = []
        for _ in range(args.rounds):
            (one, first), (two, second) = seconds(data, 1), seconds(data, 2)
            assert first == second
            rounds.append((size / one, size / two))
    ratio = statistics.median(two / one for one, two in rounds)
    claim(
        "Ingest in two processes is faster than in one, with the same bytes",
        ours=round(statistics.median(two for _, two in rounds), 1),
        peer=round(statistics.median(one for one, _ in rounds), 1),
        peer_name="one process",
        unit="MB/s",
        ratio=ratio,
        bar=1.3,
        ok=ratio >= 1.3,
        samples=[[round(x, 1) for x in pair] for pair in rounds],
    )


if __name__ == "__main__":
    main()
