"""The flywheel over HTTP: raters vote on a served model, `whorl run flywheel` trains the next, `whorl promote` serves it.

    python bench/loop/flywheel.py [--seeds 5]             # brackets: three rounds of comparisons
    python bench/loop/flywheel.py --thumbs [--seeds 5]    # the quickstart's model: one round of thumbs alone
    python bench/loop/flywheel.py --quick                 # one seed

Every part is the command that a user types, in a separate process: `whorl serve --log`, `whorl simulate-raters` (300
raters, 15 % wrong, left favoured 60 to 40, one in ten random), `whorl run flywheel`, `whorl promote`. The server keeps
running and takes over the promoted weights. The gate has no blind votes here: it decides by the step `compare`, which
sees the same noisy votes and no known preference.

brackets  The model of `bench/align/preferences.py`, fine-tuned on careless texts. Each round has 2,000 votes. After each
          round the served model answers prompts that no round has logged. Its win rate counts against the answers of the
          model of the beginning to the same prompts; a tie is a half.
--thumbs  `quickstart/rl`, 2,000 likes and dislikes of raters who prefer functions that compile. Measured is the share of
          answers that compile, to headers of functions that were not logged, before and after.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import ROOT, claim, parse, quickstart_store, sized

from whorl.loop.known_preferences import known_preference
from whorl.models import save_model
from whorl.store import Artifact, Store
from whorl.store.build import Build

BARS, GAIN = {1: 0.75, 3: 0.85}, 0.10
VOTES, HELD_OUT = sized((2000, 1000), (60, 40))
BRACKETS = ["preference.lr_scale=0.3", 'preference.optimizer="muon"', "preference.data.seq_len=40",
            "preference.data.batch_size=64"]  # fmt: skip


class Circle:
    """A store in a new folder, a server of one of its models, and the commands that use them."""

    def __init__(self, folder: Path, preference: str, seed: int) -> None:
        self.folder, self.store, self.preference, self.seed = (
            folder,
            Store(folder / "store"),
            preference,
            seed,
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.environment = os.environ | {"WHORL_HOME": str(folder / "store"), "PYTHONPATH": str(ROOT / "src")}
        self.environment.pop("WHORL_LOG", None)
        self.seconds: dict[str, float] = {}

    def whorl(self, *words: str) -> str:
        """Run a command; return its output. A failure ends the bench with it, except that the gate refuses a model."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "whorl.cli", *words]
        done = subprocess.run(command, env=self.environment, cwd=self.folder, capture_output=True, text=True)
        self.seconds[words[0]] = self.seconds.get(words[0], 0.0) + time.perf_counter() - began
        if done.returncode and "does not replace" not in done.stderr:
            sys.exit(
                f"whorl {' '.join(words)}: exit code {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            )
        return done.stdout + done.stderr

    @contextmanager
    def served(self, model: str) -> Iterator[None]:
        """Serve a model with a log until the end."""
        command = [sys.executable, "-m", "whorl.cli", "serve", model, "--log", "--port", str(self.port)]
        with (self.folder / "server.txt").open("w") as output:
            server = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=output, stderr=output
            )
        try:
            for _ in range(600):
                try:
                    httpx.get(f"{self.url}/health")
                    break
                except httpx.TransportError:
                    if server.poll() is not None:
                        sys.exit(f"the server ended:\n{(self.folder / 'server.txt').read_text()}")
                    time.sleep(0.1)
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)

    def answers(self, prompts: list[str]) -> list[str]:
        """Return the answers of the served model, which are not logged."""
        tokens = known_preference(self.preference).max_tokens
        with httpx.Client(base_url=self.url, timeout=120) as client, ThreadPoolExecutor(16) as pool:
            model = client.get("/v1/models").json()["data"][0]["id"]

            def answer(number: int) -> str:
                body = {
                    "model": model,
                    "prompt": prompts[number],
                    "max_tokens": tokens,
                    "temperature": 1.0,
                    "seed": number,
                }
                found = client.post("/v1/completions", json=body)
                found.raise_for_status()
                return str(found.json()["choices"][0]["text"])

            return [*pool.map(answer, range(len(prompts)))]

    def scores(self, prompts: list[str]) -> np.ndarray:
        return np.array(known_preference(self.preference).scores(prompts, self.answers(prompts)))

    def round(self, number: int, *settings: str, thumbs: bool = False) -> dict[str, Any]:
        """Collect votes, train, compare and promote; return their results."""
        votes = ["--votes", str(VOTES), "--seed", str(100 * self.seed + number)]
        rated = self.whorl(
            "simulate-raters", self.url, "--preference", self.preference, *votes, *["--thumbs"] * thumbs
        )
        sets = [word for text in (*settings, f"preference.seed={self.seed}") for word in ("--set", text)]
        self.whorl("run", "flywheel", "--no-live", *sets)
        promoted = self.whorl("promote", "flywheel/preference")
        time.sleep(4)  # the server reads the name every second
        trained = self.store.open("flywheel/preference")
        return {
            "votes": rated.strip().splitlines()[-1], "objective": trained.summary["objective"],
            "compare": self.store.open("flywheel/compare").summary["headline"], "gate": promoted.strip().splitlines()[0],
        }  # fmt: skip


def brackets_model(circle: Circle, seed: int) -> Artifact:
    """Put the careless model of `bench/align/preferences.py` into the store."""
    from bench.align.preferences import Contest

    contest = Contest(seed)
    with Build(
        circle.store, kind="model", name="brackets/sft", parents={}, config={"seed": seed}, version=1
    ) as build:
        save_model(contest.model(contest.weights), build.path)
        contest.encoder.tokenizer.save(build.path)
    assert build.artifact is not None
    return build.artifact


def unlogged(seed: int, rounds: int, preference: str) -> list[str]:
    """Return prompts that no round of this seed logs, in random order."""
    known = known_preference(preference)
    used = {prompt for n in range(1, rounds + 1) for prompt in known.prompts(100 * seed + n)[:VOTES]}
    return [prompt for prompt in known.prompts(100 * seed) if prompt not in used][:HELD_OUT]


def brackets(seed: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        circle = Circle(Path(place), "brackets", seed)
        circle.store.make_folders()
        brackets_model(circle, seed)
        held = unlogged(seed, rounds, "brackets")
        row: dict[str, Any] = {"seed": seed, "held out": len(held)}
        with circle.served("brackets/sft"):
            base = circle.scores(held)
            row["faultless"] = [round(float((base == 0).mean()), 4)]
            for number in range(1, rounds + 1):
                row[f"round {number}"] = circle.round(number, *BRACKETS)
                now = circle.scores(held)
                row[f"win {number}"] = round(float(np.mean((now > base) + 0.5 * (now == base))), 4)
                row["faultless"].append(round(float((now == 0).mean()), 4))
                print(
                    {"seed": seed, "round": number, "win": row[f"win {number}"], **row[f"round {number}"]},
                    flush=True,
                )
        row["seconds"] = {name: round(value, 1) for name, value in circle.seconds.items()}
        row["completions"] = circle.store.open("flywheel/events").summary["completions"]
    return row


def thumbs(seed: int, origin: Store) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as place:
        circle = Circle(Path(place), "compiles", seed)
        circle.store.make_folders()
        for folder in ("artifacts", "names"):
            shutil.copytree(origin.root / folder, circle.store.root / folder, dirs_exist_ok=True)
        held = unlogged(seed, 1, "compiles")
        with circle.served("quickstart/rl"):
            before = circle.scores(held).mean()
            found = circle.round(1, thumbs=True)
            after = circle.scores(held).mean()
        row = {
            "seed": seed,
            "before": round(float(before), 4),
            "after": round(float(after), 4),
            "functions": len(held),
        }
        row |= found | {"seconds": {name: round(value, 1) for name, value in circle.seconds.items()}}
    print(row, flush=True)
    return row


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--rounds", type=int, default=3)
        parser.add_argument("--thumbs", action="store_true", help="thumbs on the quickstart's model")
        parser.add_argument("--store", help="with quickstart/rl; default: $WHORL_BENCH_STORE")

    a = parse(__doc__, arguments, smoke={"rounds": 1}, quick={"seeds": 1})
    quick = bool(getattr(a, "quick", False))
    if a.thumbs:
        origin = quickstart_store(a.store, "quickstart/rl")
        rows = [thumbs(seed, origin) for seed in range(a.seeds)]
        gain = min(row["after"] - row["before"] for row in rows)
        claim(
            "held-out functions that compile after a round of thumbs, gain, worst of the seeds", ours=round(gain, 4),
            peer=0.0, peer_name="the served model", unit="share", ratio=round(gain, 4), bar=GAIN, ok=gain >= GAIN,
            samples=rows, quick=quick, variant="thumbs",
        )  # fmt: skip
        return
    rows = [brackets(seed, a.rounds) for seed in range(a.seeds)]
    for rounds, bar in BARS.items():
        if rounds <= a.rounds:
            worst = min(row[f"win {rounds}"] for row in rows)
            claim(
                f"win rate after {rounds} round{'s' * (rounds > 1)} of votes over HTTP, worst of the seeds", ours=worst,
                peer=0.5, peer_name="the model of the beginning", unit="win rate", ratio=worst, bar=bar, ok=worst >= bar,
                samples=rows, quick=quick, variant=f"{rounds} rounds",
            )  # fmt: skip


if __name__ == "__main__":
    main()
