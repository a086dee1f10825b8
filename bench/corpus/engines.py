"""One job on the engines: units of work in a local pool and on Ray, Daft with and without Ray, and Spark in local mode.

    python bench/corpus/engines.py [--daft PYTHON] [--spark PYTHON] [--megabytes 400] [--workers 2] [--rounds 3]
        [--quick] [--save]

The job counts equal lines of a corpus (map, shuffle by line, reduce): lines of at least 30 characters without white space,
compared with runs of white space as one space. The result is every line that occurs again, with its count. All engines
read the same eight Parquet files and write Parquet. Their counts of repeated lines and of copies must be equal. The text is
the standard library's, with a number in each repetition. The seconds are those of a fresh process, with the start of Ray
or of the JVM. Also measured, on our units:

- the price of intermediates: one worker that writes and hashes its files, against the same functions in memory.
- the price of a rerun: the process of one unit of eight is killed once, at the unit's end.
- a changed file: one of eight, with the units of the others kept.

Peers that are not installed are left out. PYTHON of Daft and Spark are interpreters of separate environments; Spark
needs Java 17 (`openjdk-17-jre-headless`).
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse

from whorl.corpus.deduplication.lines import LineConfig, line_hashes
from whorl.corpus.deduplication.near.arrays import read_arrays, write_arrays
from whorl.corpus.mapreduce import (
    Input,
    LocalPool,
    RayTasks,
    Stage,
    Unit,
    UnitStore,
    partition_name,
    shuffled,
)

FILES, PARTITIONS, CHARACTERS = 8, 4, 30
MODULE = "bench.corpus.engines"
DAFT = """
import json, sys, time
import daft
from daft import col
files, out, characters, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
if sys.argv[5] == "ray":
    import ray
    ray.init(num_cpus=workers, include_dashboard=False, logging_level="error")
    daft.set_runner_ray()
else:
    daft.set_runner_native(num_threads=workers)
lines = daft.read_parquet(files).select(col("text").split("\\n").alias("line")).explode("line")
line = col("line").regexp_replace("[\\t-\\r ]+", " ").lstrip().rstrip()
lines = lines.select(line.alias("line")).where(
    col("line").regexp_replace("[ ]+", "").length() >= characters)
counts = lines.groupby("line").agg(col("line").count().alias("n")).where(col("n") > 1)
counts.write_parquet(out)
"""
SPARK = """
import json, os, sys
from pathlib import Path
from pyspark.sql import SparkSession, functions as F
files, out, characters, workers = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
spark = (SparkSession.builder.master(f"local[{workers}]").config("spark.ui.enabled", "false")
         .config("spark.driver.memory", "4g").config("spark.sql.shuffle.partitions", 4)
         .config("spark.local.dir", out + "-local").getOrCreate())
spark.sparkContext.setLogLevel("ERROR")
lines = spark.read.parquet(*sorted(str(p) for p in Path(files).parent.glob("*.parquet")))
lines = lines.select(F.explode(F.split("text", "\\n")).alias("line"))
lines = lines.select(F.trim(F.regexp_replace("line", "[\\\\t-\\\\r ]+", " ")).alias("line"))
lines = lines.where(F.length(F.regexp_replace("line", " ", "")) >= characters)
lines.groupBy("line").agg(F.count("*").alias("n")).where("n > 1").write.parquet(out)
size = sum(p.stat().st_size for p in Path(out + "-local").rglob("*") if p.is_file())
print(json.dumps({"intermediate": size}))
"""


def map_lines(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Map: write the hashes of a file's lines and their counts, by partition. `dies`: killed once at its end."""
    hashes, counts = counted_lines(inputs[0])
    for number, chosen in enumerate(partitioned(hashes)):
        write_arrays(out / partition_name(number), hashes[chosen], counts[chosen])
    if arguments.get("dies") and not (marker := Path(config["marker"])).exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {"lines": int(counts.sum())}


def count_lines(
    inputs: Sequence[str], out: Path, config: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, int]:
    """Reduce: write the lines of a partition that repeat, with their counts."""
    parts = [read_arrays(path) for path in inputs]
    hashes, counts = repeated([p[0] for p in parts], [p[1] for p in parts])
    pq.write_table(pa.table({"line": hashes, "n": counts}), out / "lines.parquet")
    return {"lines": len(counts), "copies": int(counts.sum())}


def counted_lines(path: str) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    hashes, config = [], LineConfig(min_characters=CHARACTERS)
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            hashes.append(
                line_hashes(file.read_row_group(group, columns=["text"])["text"].to_pylist(), config)[0]
            )
    every = np.concatenate(hashes)
    return np.unique(every[every != 0], return_counts=True)


def partitioned(hashes: NDArray[np.uint64]) -> list[slice]:
    """Return the ranges of sorted hashes that belong to each partition."""
    bounds = [p * ((1 << 64) // PARTITIONS) for p in range(1, PARTITIONS)]
    ends = [0, *np.searchsorted(hashes, np.array(bounds, np.uint64)).tolist(), len(hashes)]
    return [slice(a, b) for a, b in itertools.pairwise(ends)]


def repeated(
    hashes: Sequence[NDArray[np.uint64]], counts: Sequence[NDArray[np.int64]]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    found, inverse = np.unique(np.concatenate(hashes), return_inverse=True)
    total = np.bincount(inverse, weights=np.concatenate(counts), minlength=len(found)).astype(np.int64)
    return found[total > 1], total[total > 1]


def run_units(
    files: Sequence[str], units: str, engine: str, workers: int, marker: str = ""
) -> dict[str, Any]:
    """Run the job in units of work, and return its figures; called in a child process.

    marker: file that exists once the first unit was killed. All units then run in workers, never in this process.
    """
    began = time.perf_counter()
    executor = RayTasks(workers) if engine == "ray" else LocalPool(workers, isolate=bool(marker))
    store = UnitStore(Path(units))
    inputs = [
        Unit((Input.of(Path(path)),), {"dies": bool(marker) and i == 0}) for i, path in enumerate(files)
    ]
    mapped = store.run(Stage(f"{MODULE}:map_lines", 1, {"marker": marker}), inputs, executor)
    reduced = store.run(Stage(f"{MODULE}:count_lines", 1), shuffled(mapped), executor)
    summary = {k: sum(o.summary[k] for o in reduced) for k in ("lines", "copies")}
    size = sum((o.folder / name).stat().st_size for o in mapped for name in o.files)
    return {**summary, "intermediate": size, "job": time.perf_counter() - began}


def run_memory(files: Sequence[str]) -> dict[str, Any]:
    """Run the functions of the job in this process, without files between them."""
    began = time.perf_counter()
    mapped = [counted_lines(path) for path in files]
    ranges = [partitioned(hashes) for hashes, _ in mapped]
    pairs = [*zip(mapped, ranges, strict=True)]
    found = [
        repeated([hashes[r[p]] for (hashes, _), r in pairs], [counts[r[p]] for (_, counts), r in pairs])
        for p in range(PARTITIONS)
    ]
    return {
        "lines": sum(len(n) for _, n in found), "copies": int(sum(n.sum() for _, n in found)), "intermediate": 0,
        "job": time.perf_counter() - began,
    }  # fmt: skip


def timed(command: Sequence[str], **environment: str) -> dict[str, Any]:
    """Run a process; its seconds and the JSON of its last line. Raises SystemExit if it fails."""
    began = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, **environment}, text=True, capture_output=True)
    seconds = time.perf_counter() - began
    if done.returncode:
        sys.exit(f"{command[0]} failed with {done.returncode}:\n{done.stderr[-3000:]}")
    last = (done.stdout.strip().splitlines() or ["{}"])[-1]
    return {"seconds": round(seconds, 3), **(json.loads(last) if last.startswith("{") else {})}


def ours(call: str) -> dict[str, Any]:
    code = f"import json; from {MODULE} import *\nif __name__ == '__main__': print(json.dumps({call}))"
    paths = f"{ROOT}{os.pathsep}{ROOT / 'src'}"
    return timed([sys.executable, "-c", code], PYTHONPATH=paths, RAY_USAGE_STATS_ENABLED="0")


def peer(python: str, code: str, folder: Path, out: Path, workers: int, runner: str) -> dict[str, Any]:
    """Run Daft or Spark, and count its result; `runner` is that of Daft."""
    shutil.rmtree(out, ignore_errors=True)
    pattern = str(folder / "*.parquet")
    command = [python, "-c", code, pattern, str(out), str(CHARACTERS), str(workers), runner]
    found = timed(command, DO_NOT_TRACK="1", RAY_USAGE_STATS_ENABLED="0", PYTHONPATH="")
    counts = pq.read_table(out, columns=["n"])["n"].to_numpy()
    return {**found, "lines": len(counts), "copies": int(counts.sum())}


def write_files(folder: Path, megabytes: float) -> list[str]:
    """Write documents of the standard library into Parquet files, and return their paths."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    texts = [path.read_text("utf-8", "replace") for path in paths]
    rows: list[list[str]] = [[] for _ in range(FILES)]
    written = number = 0
    while written < megabytes * 1e6:
        text = texts[number % len(texts)]
        if number >= len(texts):  # lines of a repetition differ from those of others
            text = text.replace("self", f"self{number // len(texts)}").replace(
                "return", f"return {number // len(texts)}"
            )
        rows[number % FILES].append(text)
        written += len(text)
        number += 1
    for i, some in enumerate(rows):
        pq.write_table(
            pa.table({"text": some}), folder / f"{i}.parquet", row_group_size=256, compression="zstd"
        )
    return [str(folder / f"{i}.parquet") for i in range(FILES)]


def installed(python: str | None, module: str) -> bool:
    if not python or subprocess.run([python, "-c", f"import {module}"], stderr=subprocess.DEVNULL).returncode:
        print(f"left out: {module}, not installed in {python}")
        return False
    return True


def measure(files: Sequence[str], folder: Path, args: Any) -> dict[str, list[dict[str, Any]]]:
    """Return name -> figures of each round."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    given = json.dumps([*files])
    peers = {"daft": (args.daft, DAFT, "daft"), "daft on ray": (args.daft, DAFT, "daft, ray")}
    peers["spark"] = args.spark, SPARK, "pyspark"
    peers = {name: found for name, found in peers.items() if installed(found[0], found[2])}
    for _ in range(args.rounds):
        units = {name: str(folder / f"units-{name}") for name in ("pool", "ray", "one", "killed")}
        marker = folder / "marker"
        marker.unlink(missing_ok=True)
        for path in units.values():
            shutil.rmtree(path, ignore_errors=True)
        measured = {
            "pool": ours(f"run_units({given}, {units['pool']!r}, 'local', {args.workers})"),
            "again": ours(f"run_units({given}, {units['pool']!r}, 'local', {args.workers})"),
            "killed": ours(
                f"run_units({given}, {units['killed']!r}, 'local', {args.workers}, {str(marker)!r})"
            ),
            "one worker": ours(f"run_units({given}, {units['one']!r}, 'local', 1)"),
            "memory": ours(f"run_memory({given})"),
        }
        changed = folder / "changed.parquet"
        table = pq.read_table(files[-1])
        pq.write_table(table.slice(1), changed, row_group_size=256, compression="zstd")
        other = json.dumps([*files[:-1], str(changed)])
        measured["changed"] = ours(f"run_units({other}, {units['pool']!r}, 'local', {args.workers})")
        if installed(sys.executable, "ray"):
            measured["ray"] = ours(f"run_units({given}, {units['ray']!r}, 'ray', {args.workers})")
        for name, (python, code, _) in peers.items():
            out, runner = folder / f"out-{name}", name.rpartition(" ")[2]
            measured[name] = peer(python, code, Path(files[0]).parent, out, args.workers, runner)
        for name, figures in measured.items():
            print(name, figures, flush=True)
            rounds.setdefault(name, []).append(figures)
    return rounds


def main() -> None:
    args = parse(
        __doc__,
        lambda parser: (
            parser.add_argument("--daft", help="interpreter with daft, and with ray for Daft on Ray"),
            parser.add_argument("--spark", help="interpreter with pyspark"),
            parser.add_argument("--megabytes", type=float, default=400),
            parser.add_argument("--workers", type=int, default=2),
            parser.add_argument("--rounds", type=int, default=3),
            parser.add_argument("--quick", action="store_true", help="a sixth of the text, one round"),
        ),
        smoke={"megabytes": 4, "rounds": 1},
    )
    if args.quick:
        args.megabytes, args.rounds = args.megabytes // 6, 1
    with tempfile.TemporaryDirectory() as place:
        data = Path(place, "data")
        data.mkdir()
        rounds = measure(write_files(data, args.megabytes), Path(place), args)
    seconds = {name: statistics.median(f["seconds"] for f in some) for name, some in rounds.items()}
    jobs = {
        name: statistics.median(f["job"] for f in some) for name, some in rounds.items() if "job" in some[0]
    }
    results = {n: {(f["lines"], f["copies"]) for f in some} for n, some in rounds.items() if n != "changed"}
    equal = len(set().union(*results.values())) == 1
    print(f"equal results: {equal}; {results}")
    samples: list[Any] = [
        {"seconds": seconds, "job": jobs},
        {n: f[0].get("intermediate") for n, f in rounds.items()},
    ]
    others = {name: seconds[name] for name in ("ray", "daft", "daft on ray", "spark") if name in seconds}
    best = min(others, key=lambda name: others[name], default="")
    what = f"Counting the equal lines of {args.megabytes:g} MB"
    claim(
        f"{what} in a pool of {args.workers} processes is no slower than the best of Ray, Daft and Spark", unit="s",
        ours=round(seconds["pool"], 2), peer=round(others.get(best, 0.0), 2), peer_name=best or "no peer",
        ratio=others.get(best, 0.0) / seconds["pool"], bar=1, samples=samples, variant="pool", quick=args.quick,
        ok=equal and others.get(best, seconds["pool"]) >= seconds["pool"],
    )  # fmt: skip
    for name, base, variant, title, bar in (
        ("one worker", "memory", "intermediates", "with intermediates on disk and hashed, over the same in memory", 1.25),
        ("killed", "pool", "rerun", "with one unit of eight killed at its end, over undisturbed", 1.5),
        ("changed", "pool", "changed", "after one file of eight has changed, over all of it", 0.6),
    ):  # fmt: skip
        claim(
            f"{what}, {title}", ours=round(jobs[name], 2), peer=round(jobs[base], 2), peer_name=base, unit="s",
            ratio=jobs[name] / jobs[base], bar=bar, ok=jobs[name] <= bar * jobs[base], samples=samples[1:],
            variant=variant, quick=args.quick,
        )  # fmt: skip


if __name__ == "__main__":
    main()
