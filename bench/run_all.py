"""Run every bench, one after the other (two at a time with `--smoke`), and print one line for each.

    python bench/run_all.py --smoke               all of them, seconds each
    python bench/run_all.py --smoke --slice 2/8   every eighth script, beginning with the second
    python bench/run_all.py --quick               the quick forms, at most an hour, and what fell since the last time
    python bench/run_all.py --only engine,train   full sizes, hours
    python bench/run_all.py --quick --peer vllm=/PATH/bin/python --peer lmeval_vllm=/PATH/bin/python

A script passes if it exits with 0 and its last line is a JSON record. If its peer, data or model is absent, it exits with 77
and prints one line: what is missing and how to get it.

`--quick` gives `--quick` to the scripts that have it; the others run at full size, within the time limit. The first
are those without a figure of this kind of machine, then those with the oldest one, so that the next run measures what did
not fit into the hour. When the hour is over, the rest is named as not run. Records go into
`bench/results/quick/KIND.jsonl` (`bench/_guard.py`). Scripts that need a trained model read the default store; if it has
no quickstart/pretrain, a small one is made in a scratch folder for this run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import _guard
from bench._peers import TITLES, VARIABLE
from bench._run import PRETRAINED, SKIPPED, STORE

ROOT = Path(__file__).parents[1]
FIELDS = {"claim", "ours", "peer", "unit", "ratio", "bar", "ok", "machine", "samples"}
SMOKE_SECONDS, QUICK_SECONDS, FULL_SECONDS = 180, 150, 7200  # time limits of one script
QUICK_TOTAL = 3500.0  # seconds of all scripts with --quick
# The quickstart of a quick run: the planner's budget, at a fixed shape whose columns are divided by every group of int4.
QUICKSTART = (
    "--budget", "20s", "--until", "pretrain", "--no-live", "--set", "plan.d_model=128", "--set", "plan.n_layers=3",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """result: "passed", "skipped" or "failed". records: the JSON lines that the script printed."""

    result: str
    reason: str = ""
    records: list[dict[str, Any]] = field(default_factory=list)


def scripts() -> list[Path]:
    """Every bench and every study with a figure, in a fixed order."""
    found = [p for p in (ROOT / "bench").rglob("*.py") if len(p.relative_to(ROOT / "bench").parts) > 1]
    found = [p for p in found if not p.name.startswith("_") and "support" not in p.parts]
    found += [p for p in (ROOT / "studies").rglob("*.py") if p.stem in ("figure", "run")]
    return sorted(found)


def has_quick_form(script: Path) -> bool:
    """Whether the script takes `--quick`."""
    text = script.read_text(encoding="utf-8")
    return any(part in text for part in ('"--quick"', "parse_quick(", "quick={", "trl.parse_options("))


def needs_store(script: Path) -> bool:
    """Whether the script reads the artifacts of a quickstart."""
    text = script.read_text(encoding="utf-8")
    return re.search(r"\b(open_store|quickstart_store)\(", text) is not None


def execute(command: list[str], timeout: float) -> tuple[int, str, str]:
    """Run Python and return (exit code, output, errors).

    Its process group is killed after `timeout` seconds, and if this process is interrupted.

    Raises:
        TimeoutExpired: it was killed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if "--smoke" in command:  # two scripts at a time: a thread that waits leaves its core to the other script
        environment |= {"GOMP_SPINCOUNT": "0"}
    process = subprocess.Popen(
        [sys.executable, *command], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        printed, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, printed, errors


def run(script: Path, options: list[str], timeout: float) -> Outcome:
    """Run a script for at most `timeout` seconds."""
    try:
        code, printed, errors = execute([str(script), *options], timeout)
    except subprocess.TimeoutExpired:
        return Outcome("failed", f"no result after {timeout:.0f} s")
    lines = [line for line in printed.splitlines() if line.strip()]
    if code == SKIPPED:
        return Outcome("skipped", lines[-1] if lines else errors.strip().split("\n")[-1])
    if code:
        return Outcome("failed", errors.strip().split("\n")[-1][:200])
    records = [json.loads(line) for line in lines if line.startswith("{") and '"claim"' in line]
    if not records or not lines[-1].startswith("{"):
        return Outcome("failed", "the last line is no JSON record")
    missing = [sorted(FIELDS - record.keys()) for record in records]
    if any(missing):
        return Outcome("failed", f"the record has no field {next(filter(None, missing))[0]!r}")
    return Outcome("passed", "", records)


def report(script: Path, outcome: Outcome, seconds: float) -> None:
    """Print a script's line."""
    reason = f": {outcome.reason}" if outcome.reason else ""
    print(f"{outcome.result:8} {seconds:6.1f} s  {script.relative_to(ROOT)}{reason}", flush=True)


@contextmanager
def quickstart(timeout: float) -> Iterator[None]:
    """Within it, scripts find a trained model: in the store that they would use, or in a new one of a scratch folder."""
    from whorl.errors import StoreError
    from whorl.store import Store

    location = os.environ.get(STORE) or os.environ.get("WHORL_HOME") or ".whorl"
    with suppress(StoreError):
        Store(location if "://" in location else ROOT / Path(location).expanduser()).open(PRETRAINED)
        timeout = 0
    before = os.environ.pop(STORE, None)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if timeout:
            make_quickstart(folder, timeout)
        try:
            if found := folder if timeout else before:
                os.environ[STORE] = found
            yield
        finally:
            os.environ.pop(STORE, None)
            if before is not None:
                os.environ[STORE] = before


def make_quickstart(folder: str, timeout: float) -> None:
    """Make a small quickstart in `folder`, and print a line."""
    options = ["run", "quickstart", *QUICKSTART]
    print(f"no {PRETRAINED} in the store; making a small one: whorl {' '.join(options)}", flush=True)
    began = time.monotonic()
    try:
        code, _, errors = execute(["-m", "whorl.cli", *options, "--store", folder], timeout)
        ended = f"failed: {errors.strip()[-200:]}" if code else "made"
    except subprocess.TimeoutExpired:
        ended = f"no result after {timeout:.0f} s"
    print(f"{ended:8} {time.monotonic() - began:6.1f} s  {PRETRAINED}", flush=True)


def run_quick(chosen: list[Path], limit: float, total: float = QUICK_TOTAL) -> Counter[str]:
    """Run the quick forms, keep their records, and print what fell; return the number of scripts by result."""
    print(
        f"{len(chosen)} scripts, at most {min(total, limit * (len(chosen) + 2)) / 60:.0f} minutes", flush=True
    )
    path, end = _guard.quick_file(_guard.kind_of_machine()), time.monotonic() + total
    last = _guard.read_quick(path)
    dates: dict[str, str] = {}  # of the newest figure
    for record in last.values():
        dates[record["script"]] = max(record["date"], dates.get(record["script"], ""))
    order = sorted(chosen, key=lambda script: dates.get(str(script.relative_to(ROOT)), ""))
    made, counts = dict[str, dict[str, Any]](), Counter[str]()
    with quickstart(min(2 * limit, total)) if any(map(needs_store, chosen)) else nullcontext():
        before = _guard.current_rates()
        for script in order:
            left = end - time.monotonic()
            if left < 1:
                counts["not run"] += 1
                print(f"not run, the time is over: {script.relative_to(ROOT)}")
                continue
            started = time.monotonic()
            outcome = run(script, ["--quick"] * has_quick_form(script), min(limit, left))
            seconds = time.monotonic() - started
            report(script, outcome, seconds)
            counts[outcome.result] += 1
            after = _guard.current_rates()
            for record in outcome.records:
                made[record["id"]] = {
                    **record,
                    "quick": has_quick_form(script),
                    "rates": _guard.mean_rates(before, after),
                    "seconds": round(seconds, 1),
                }
            before = after
            _guard.write_quick(path, {**last, **made})
    fell = _guard.falls(last, made.values())
    print(
        f"{len(made)} figures in {path.name}, {len(made.keys() & last.keys())} of them compared with the last ones"
    )
    for line in fell:
        print(f"fell: {line}")
    print("`python bench/report.py` writes them into docs/benchmarks.md")
    return counts


def run_others(chosen: list[Path], smoke: bool, limit: float) -> Counter[str]:
    """Run at full sizes or with `--smoke`; return the number of scripts by result."""

    def one(script: Path) -> str:
        started = time.monotonic()
        outcome = run(script, ["--smoke"] * smoke, limit)
        report(script, outcome, time.monotonic() - started)
        return outcome.result

    with ThreadPoolExecutor(2 if smoke else 1) as pool:
        return Counter(pool.map(one, chosen))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--smoke", action="store_true", help="tiny sizes")
    size.add_argument(
        "--quick", action="store_true", help="quick forms, kept and compared with the last ones"
    )
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="every N-th script from the K-th on")
    parser.add_argument(
        "--only", default="", metavar="NAME,...", help="folders of bench/, or names of scripts"
    )
    parser.add_argument(
        "--timeout", type=float, default=0, help=f"seconds a script; default {SMOKE_SECONDS} with --smoke, "
        f"{QUICK_SECONDS} with --quick, else {FULL_SECONDS}",
    )  # fmt: skip
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=PYTHON",
        help="interpreter of a peer, for every script",
    )
    args = parser.parse_args()
    for text in args.peer:
        name, _, python = text.partition("=")
        if name not in TITLES or not Path(python).is_file():
            parser.error(
                f"--peer {text}: expected NAME=PYTHON, NAME one of {', '.join(TITLES)}, PYTHON an interpreter"
            )
    if args.peer:
        os.environ[VARIABLE] = ",".join(args.peer)
    first, step = map(int, args.slice.split("/"))
    chosen = scripts()[first - 1 :: step]
    if args.only:
        names = set(args.only.split(","))
        chosen = [p for p in chosen if names & {*p.relative_to(ROOT).parts, p.stem}]
    began = time.monotonic()
    if args.quick:
        counts = run_quick(chosen, args.timeout or QUICK_SECONDS)
    else:
        counts = run_others(
            chosen, args.smoke, args.timeout or (SMOKE_SECONDS if args.smoke else FULL_SECONDS)
        )
    results = ", ".join(f"{counts[name]} {name}" for name in ("passed", "skipped", "failed", "not run"))
    print(f"{results}; {time.monotonic() - began:.0f} s")
    sys.exit(bool(counts["failed"]))


if __name__ == "__main__":
    main()
