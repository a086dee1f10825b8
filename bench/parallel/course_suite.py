"""The public tests of Stanford CS336's assignment 2 (systems) on parallel/explained.

    python bench/parallel/course_suite.py CHECKOUT     # of github.com/stanford-cs336/assignment2-systems

Runs the checkout's tests of data parallelism (plain, bucketed), of the sharded optimizer and of FSDP (fp32, fp16) in a copy
of its `tests` whose adapters are `_course_adapters.py`. The tests of attention kernels are left out. The tests of FSDP need
the checkout's cs336-basics, with its requirements einops and jaxtyping.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, skip

PARTS = ("test_ddp", "test_sharded_optimizer", "test_fsdp")


def run(checkout: Path) -> dict[str, int]:
    """Numbers of tests by outcome."""
    with tempfile.TemporaryDirectory() as folder:
        tests = Path(folder) / "tests"
        shutil.copytree(checkout / "tests", tests)
        (tests / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("_course_adapters.py"), tests / "adapters.py")
        files = [str(path) for part in PARTS for path in sorted(tests.glob(f"{part}*.py"))]
        paths = [folder, str(ROOT / "src"), str(checkout / "cs336-basics"), str(checkout)]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder, *files],
            cwd=folder, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, capture_output=True, text=True,
        )  # fmt: skip
    print(done.stdout[-4000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    return {kind: int(n) for n, kind in re.findall(r"(\d+) (passed|failed|errors?|skipped)", last)}


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("checkout", type=Path, nargs="?", help="of assignment2-systems")

    args = parse(__doc__, arguments)
    if args.checkout is None or not (args.checkout / "tests" / "common.py").exists():
        skip(
            "no checkout: git clone https://github.com/stanford-cs336/assignment2-systems, and give its path"
        )
    outcomes = run(args.checkout.resolve())
    passed, total = outcomes.get("passed", 0), sum(outcomes.values())
    claim(
        "tests of CS336's assignment 2: DDP, sharded optimizer, FSDP",
        ours=passed, peer=total, peer_name="tests", unit="tests", ratio=passed / max(1, total), bar=1.0,
        ok=passed == total > 0, samples=[outcomes],
    )  # fmt: skip


if __name__ == "__main__":
    main()
