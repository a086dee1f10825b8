"""Run every bench, one after the other (two at a time with `--smoke`), and print one line for each.

    python bench/run_all.py --smoke               all of them, seconds each
    python bench/run_all.py --smoke --slice 2/8   every eighth script, beginning with the second
    python bench/run_all.py --only engine,train   full sizes, hours

A script passes if it exits with 0 and its last line is a JSON record. A script whose peer is not installed exits with 77.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIELDS = {"claim", "ours", "peer", "unit", "ratio", "bar", "ok", "machine", "samples"}
SKIPPED = 77


def scripts() -> list[Path]:
    """Every bench and every study with a figure, in a fixed order."""
    found = [p for p in (ROOT / "bench").rglob("*.py") if len(p.relative_to(ROOT / "bench").parts) > 1]
    found = [p for p in found if not p.name.startswith("_") and "support" not in p.parts]
    found += [p for p in (ROOT / "studies").rglob("*.py") if p.stem in ("figure", "run")]
    return sorted(found)


def run(script: Path, *, smoke: bool, timeout: float) -> tuple[str, str]:
    """(outcome, reason): "passed", "skipped" or "failed"."""
    command = [sys.executable, str(script), *(["--smoke"] if smoke else [])]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return "failed", f"no result after {timeout:.0f} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode == SKIPPED:
        return "skipped", lines[-1] if lines else done.stderr.strip().split("\n")[-1]
    if done.returncode:
        return "failed", done.stderr.strip().split("\n")[-1][:200]
    try:
        missing = FIELDS - json.loads(lines[-1]).keys()
    except (IndexError, ValueError, AttributeError):
        return "failed", "the last line is no JSON record"
    return ("failed", f"the record has no field {sorted(missing)[0]!r}") if missing else ("passed", "")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--slice", default="1/1", metavar="K/N", help="every N-th script from the K-th on")
    parser.add_argument("--only", default="", metavar="ROOM,...", help="folders of bench/")
    parser.add_argument("--timeout", type=float, default=0, help="seconds a script; default 180 or 7200")
    args = parser.parse_args()
    first, step = map(int, args.slice.split("/"))
    chosen = scripts()[first - 1 :: step]
    if args.only:
        chosen = [p for p in chosen if set(args.only.split(",")) & set(p.relative_to(ROOT).parts)]

    def report(script: Path) -> bool:
        began = time.monotonic()
        outcome, why = run(script, smoke=args.smoke, timeout=args.timeout or (180 if args.smoke else 7200))
        name = script.relative_to(ROOT)
        print(f"{outcome:8} {time.monotonic() - began:6.1f} s  {name}{': ' + why if why else ''}", flush=True)
        return outcome == "failed"

    with ThreadPoolExecutor(2 if args.smoke else 1) as pool:
        failed = sum(pool.map(report, chosen))
    print(f"{len(chosen) - failed} passed or skipped, {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
