"""Programs verified per second: forks of a warm, confined process against a fresh interpreter for each.

    python bench/sandbox/check_rate.py [--quick]

A training step verifies 128 programs: a function of a few lines and a unittest case of two tests; a quarter of the
programs is wrong. Both sides use two processes at a time and must give the same verdicts. The peer is `python -I -S`
with the program and its tests on the command line, unconfined; -S skips the search for installed packages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse_quick, sized

from whorl.sandbox import Program, Sandbox

CHECKS = sized(128, 8)
TESTS = """
import unittest
class Tests(unittest.TestCase):
    def test_small(self):
        self.assertEqual(mean([1, 2, 3]), 2)
    def test_empty(self):
        with self.assertRaises(ValueError):
            mean([])
"""
SOURCE = '''
def mean(values):
    """The mean of some numbers."""
    if not values:
        raise ValueError("no values")
    return sum(values) / {divisor}
'''
END = "\nif not unittest.main(exit=False, argv=['tests']).result.wasSuccessful(): raise SystemExit(1)\n"


def fresh(source: str) -> bool:
    command = [sys.executable, "-I", "-S", "-c", source + TESTS + END]
    return subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


def main() -> None:
    quick = parse_quick(__doc__)
    sources = [SOURCE.format(divisor=4 if i % 4 == 3 else "len(values)") for i in range(CHECKS)]
    right = [i % 4 != 3 for i in range(CHECKS)]
    with Sandbox(workers=2) as sandbox, ThreadPoolExecutor(2) as pool:

        def ours() -> float:
            began = time.perf_counter()
            verdicts = [o.ok for o in sandbox.run_all([Program(s, TESTS) for s in sources])]
            assert verdicts == right
            return time.perf_counter() - began

        def peer() -> float:
            began = time.perf_counter()
            assert list(pool.map(fresh, sources)) == right
            return time.perf_counter() - began

        ours(), peer()
        pairs = [(ours(), peer()) for _ in range(sized(2 if quick else 5, 1))]
    a, b = (sorted(side)[len(pairs) // 2] for side in zip(*pairs, strict=True))
    print(f"{CHECKS} checks: {a:.2f} s, a fresh interpreter each {b:.2f} s")
    claim(
        f"programs verified in the sandbox, {CHECKS} at two at a time",
        ours=CHECKS / a, peer=CHECKS / b, unit="programs/s", ratio=b / a, bar=4.0, ok=b / a >= 4 and a < 1.0,
        samples=pairs, quick=quick, peer_name="a fresh interpreter each",
    )  # fmt: skip


if __name__ == "__main__":
    main()
