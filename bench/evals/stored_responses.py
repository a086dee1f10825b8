"""Stored responses: how many requests a second run sends, and how many a run sends after kill -9.

A task of questions runs by `whorl eval URL` against an endpoint in this process, which counts the requests. The evaluation
is killed ten times at random moments. Missing are the items without a stored response. The last run must send exactly
these, and a run after it none.

    python bench/evals/stored_responses.py [--items 8000] [--kills 10]
    python bench/evals/stored_responses.py --quick      # three kills
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse
from tests.support.evals.fake_endpoint import FakeEndpoint

from whorl.evals.model.response_cache import ResponseCache
from whorl.evals.results_io import load_results

TASK = """
name = "questions"
kind = "generate"
template = "Repeat {{ word }}"
gold = "word"
generation.max_tokens = 8
[data]
test = "questions.jsonl"
"""
SLOW_SECONDS = 0.05  # of an answer, so that a kill finds the run in the middle


class Slow(FakeEndpoint):
    """An endpoint that takes its time; `bodies` counts the requests."""

    def __init__(self) -> None:
        super().__init__()
        add = self.bodies

        class Counted(list):  # type: ignore[type-arg]
            def append(self, body: object) -> None:
                super().append(body)
                time.sleep(SLOW_SECONDS)

        self.bodies = Counted(add)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]  # clients are killed


def command(url: str, out: str) -> list[str]:
    words = [
        "eval",
        url,
        "--model-name",
        "fake",
        "--task",
        "questions.toml",
        "--cache",
        "responses.sqlite",
        "--out",
        out,
    ]
    return [sys.executable, "-m", "whorl.cli", *words]


def words_of(fake: FakeEndpoint, start: int) -> list[str]:
    """The questions of the requests from `start` on."""
    return [re.findall(r"w\d+", json.dumps(body))[-1] for _, body in fake.bodies[start:]]


def stored(folder: Path) -> int:
    if not (folder / "responses.sqlite").exists():
        return 0
    with ResponseCache(folder / "responses.sqlite") as cache:
        return len(cache)


def kill_once(fake: FakeEndpoint, folder: Path, rng: random.Random) -> bool:
    """Start an evaluation and kill it a random time after its first request; whether it was still running."""
    before = len(fake.bodies)
    child = subprocess.Popen(
        command(fake.url, "out"), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while len(fake.bodies) == before and child.poll() is None:
        time.sleep(0.002)
    time.sleep(rng.uniform(0.2, 4.0))
    running = child.poll() is None
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.3)  # answers under way
    return running


def main() -> None:
    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--items", type=int, default=8000)
        parser.add_argument("--kills", type=int, default=10)

    args = parse(__doc__, add, smoke={"items": 300, "kills": 2}, quick={"items": 2500, "kills": 3})
    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as name, Slow() as fake:
        folder = Path(name)
        (folder / "questions.toml").write_text(TASK)
        records = ({"id": str(i), "word": f"w{i}"} for i in range(args.items))
        (folder / "questions.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        kept = []
        for _ in range(args.kills):
            if not kill_once(fake, folder, rng):
                break
            kept.append(stored(folder))
        before, missing = len(fake.bodies), args.items - stored(folder)
        subprocess.run(command(fake.url, "out"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        sent = words_of(fake, before)
        assert len(set(sent)) == len(sent), "a question was sent twice in one run"
        subprocess.run(command(fake.url, "out"), cwd=folder, check=True, stdout=subprocess.DEVNULL)
        again = len(fake.bodies) - before - len(sent)
        result = load_results(folder / "out")[0]
        print(
            f"stored after each kill: {kept}; then {missing} missing, {len(sent)} sent, {again} in a second run"
        )
        assert result.outcomes == {"right": args.items}, result.outcomes
    claim(
        f"Requests after kill -9 at {len(kept)} random moments, beyond the missing ones", ours=len(sent) - missing, peer=0,
        unit="requests", ratio=len(sent) - missing, bar=0, ok=len(sent) == missing and len(kept) == args.kills,
        samples=kept, variant="killed", quick=args.quick,
    )  # fmt: skip
    claim(
        "Requests of a second run", ours=again, peer=args.items, unit="requests", ratio=again, bar=0, ok=again == 0,
        peer_name="without stored responses", variant="second-run", quick=args.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
