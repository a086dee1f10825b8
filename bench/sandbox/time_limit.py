"""Seconds from submitting a hostile program to its result, under full load, with a limit of 2 s.

    python bench/sandbox/time_limit.py [--rounds 3]
    python bench/sandbox/time_limit.py --quick      # one round

Each core runs a busy process and a sandbox worker. Each batch holds programs that make folders,
nested folders or files without end, sleep or loop; the next programs must find an empty folder. The
figure is the longest time from a program's start to its result. The peer is the limit itself: 1 s above it is allowed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.sandbox import Program, ResourceLimits, Sandbox

LIMIT, ALLOWED = sized(2.0, 0.3), 1.0
PROGRAMS = {
    "folders": "import os\ni = 0\nwhile True:\n    os.mkdir(str(i).ljust(250, 'x'))\n    i += 1",
    "nested folders": "import os\nwhile True:\n    os.mkdir('d')\n    os.chdir('d')",
    "files": "i = 0\nwhile True:\n    open(str(i).ljust(250, 'x'), 'w').close()\n    i += 1",
    "sleep": "import time\ntime.sleep(1000)",
    "loop": "while True: pass",
    "loop in a test": "def f():\n    while True: pass",
}
EMPTY = "import os\nassert os.listdir('.') == []"


def main() -> None:
    a = parse(__doc__, lambda p: p.add_argument("--rounds", type=int, default=3), quick={"rounds": 1})
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores)]
    longest = dict.fromkeys(PROGRAMS, 0.0)
    limits = ResourceLimits(wall_seconds=LIMIT, cpu_seconds=60, file_bytes=1 << 30)
    try:
        with Sandbox(limits, workers=cores) as sandbox:
            for _ in range(a.rounds):
                for name, source in PROGRAMS.items():
                    test = "assert f() is None" if "test" in name else ""
                    results = sandbox.run_all([Program(source, test)] * cores + [Program(EMPTY)] * cores)
                    assert all(r.kind in ("time", "files", "raised") for r in results[:cores]), results
                    assert all(r.ok or r.kind == "time" for r in results[cores:]), results
                    longest[name] = max(longest[name], *(r.seconds for r in results[:cores]))
            restarts = sandbox.restarts
    finally:
        for process in busy:
            process.kill()
            process.wait()
    for name, seconds in longest.items():
        print(f"{name:16s} {seconds:.2f} s")
    worst = max(longest.values())
    claim(
        f"longest run of a hostile program with a limit of {LIMIT:g} s, all cores busy",
        ours=worst, peer=LIMIT, unit="s", ratio=worst - LIMIT, bar=ALLOWED,
        ok=worst - LIMIT <= ALLOWED and restarts == 0, samples=list(longest.items()), peer_name="the limit",
        quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
