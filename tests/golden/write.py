"""Run the golden cases: print them, dump them for a comparison, or store them.

    python tests/golden/write.py [--cases REGEX]            run time and hashes of each case
    python tests/golden/write.py --dump FILE                hashes as JSON, for tools/compare_golden.py
    python tests/golden/write.py --store                    writes golden.json and names.json

A commit that stores other results says why they changed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STORED, NAMES = HERE / "golden.json", HERE / "names.json"
DIGITS = 7  # of a stored float, after the point


def stored(result: Any) -> dict[str, Any]:
    """The parts of a result that other machines can be compared with."""
    parts = {
        "exact": result.exact,
        "ids": {name: " ".join(digests) for name, digests in result.ids.items()},
        "curve": [round(x, DIGITS) for x in result.curve],
    }
    return {name: part for name, part in parts.items() if part}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", metavar="REGEX", help="only cases whose name matches")
    parser.add_argument("--fast", action="store_true", help="leave out slow cases")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the hashes of each case as JSON")
    parser.add_argument("--store", action="store_true", help="write golden.json and names.json")
    parser.add_argument("--source", type=Path, help="the folder that `import whorl` must come from")
    given = parser.parse_args()

    import whorl

    source = (given.source or HERE.parents[1] / "src").resolve()
    if source not in Path(whorl.__file__).resolve().parents:
        sys.exit(f"whorl is imported from {whorl.__file__}, expected below {source}: set PYTHONPATH={source}")

    sys.path.insert(1, str(HERE.parents[1]))  # for tests.support
    from cases import CASES
    from cases_surface import names

    named = [c for c in CASES.values() if re.search(given.cases, c.name)]
    chosen = [c for c in named if not (c.slow and (given.fast or given.store))]
    before = json.loads(STORED.read_text()) if given.store and STORED.exists() else {}
    dumped: dict[str, Any] = {}
    kept = {name: entry for name, entry in before.items() if name in CASES}
    failed = False
    for one in chosen:
        began = time.perf_counter()
        try:
            result = one()
        except Exception:
            failed = True
            trace = traceback.format_exc()
            print(f"{one.name}: failed\n{trace}", flush=True)
            dumped[one.name] = {"error": trace.strip().splitlines()[-1]}
            continue
        seconds = time.perf_counter() - began
        dumped[one.name] = {"seconds": round(seconds, 2), "hashes": result.hashes(), "curve": result.curve}
        marks = " ".join(f"{name}={value[:8]}" for name, value in list(result.hashes().items())[:4])
        print(f"{one.name:28} {seconds:6.2f} s  {marks}", flush=True)
        if portable := stored(result):
            kept[one.name] = portable
    if given.dump is not None:
        given.dump.write_text(json.dumps(dumped, indent=1))
    if given.store:
        entries = ",\n".join(f' "{name}": {json.dumps(kept[name])}' for name in sorted(kept))
        STORED.write_text(f"{{\n{entries}\n}}\n")
        NAMES.write_text(json.dumps(names(), indent=1) + "\n")
        print(f"written: {STORED}, {NAMES}")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
