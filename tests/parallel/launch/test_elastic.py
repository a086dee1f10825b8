"""The elastic agent with ranks that are shell commands: which ends start all ranks again, and which are final."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from whorl.parallel.launch.elastic import _codes

RANK = """
import os, signal, sys
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
words = (sys.argv[1], os.environ["RANK"], os.environ["WHORL_ATTEMPT"], os.environ.get("TORCH_DISTRIBUTED_DEBUG"))
os.write(1, (" ".join(map(str, words)) + "\\n").encode())
ends = {"killed": first, "lost": first, "helper": first, "wrong": True, "always": True, "done": False}
if os.environ["RANK"] == "1" and ends[sys.argv[1]]:
    if sys.argv[1] in ("killed", "always"):
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit({"lost": 75, "helper": 74}.get(sys.argv[1], 2))
"""
AGENT = """
import sys
from whorl.errors import WhorlError
from whorl.parallel.launch.elastic import run_elastic
from whorl.parallel.launch.spec import LaunchSpec

for case in sys.argv[2:]:
    try:
        code = run_elastic(LaunchSpec("test", (sys.executable, "-S", "-c", sys.argv[1], case), ranks=2, restarts=1))
    except WhorlError as error:
        code = error
    print(f"END {case} {code}", file=sys.stderr, flush=True)
"""


def test_ends_of_ranks_decide_restarts() -> None:
    cases = ["done", "killed", "helper", "lost", "wrong", "always"]
    done = subprocess.run(
        [sys.executable, "-c", AGENT, RANK, *cases], capture_output=True, text=True, timeout=120, check=True
    )
    starts, ends = [line.split() for line in done.stdout.splitlines()], done.stderr
    attempts = {case: {words[2] for words in starts if words[0] == case} for case in cases}
    assert {case: len(names) for case, names in attempts.items()} == {
        "done": 1, "killed": 2, "helper": 2, "lost": 2, "wrong": 1, "always": 2,
    }  # fmt: skip
    for code in ("done 0", "killed 0", "helper 0", "lost 0", "wrong 2"):
        assert f"END {code}\n" in ends
    assert "END always rank 1 was killed by SIGKILL, and 1 restart did not help\n  do:" in ends
    assert (
        ends.count("whorl: rank 1 was killed by SIGKILL; all ranks start again from the newest checkpoint")
        == 2
    )
    assert "whorl: rank 1 lost another rank; all ranks start" in ends
    assert "whorl: rank 1 lost a helper process; all ranks start" in ends
    assert {words[3] for words in starts if words[0] in ("killed", "helper")} == {"None"}
    lost = [words for words in starts if words[0] == "lost"]
    assert {words[3] for words in lost if words[2] == lost[-1][2]} == {
        "DETAIL"
    }  # names a collective out of order
    assert len(ends.splitlines()) == 6 + 4 + 1  # torch's own messages are absent


def test_an_error_of_a_rank_follows_from_the_death_of_another() -> None:
    ends = {0: 1, 1: -9, 2: -15, 3: -9}
    at = {0: 5, 1: 5, 2: 6, 3: 99}  # the last one had to be killed
    failures = {rank: SimpleNamespace(exitcode=code, timestamp=at[rank]) for rank, code in ends.items()}
    result: Any = SimpleNamespace(failures=failures)
    assert [*_codes(result).items()] == [(1, -9), (0, 1), (2, -15)]
