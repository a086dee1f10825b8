"""A run that is killed fifty times, at random moments, ends with the weights of one that was not.

.venv/bin/python bench/train/chaos.py [--quick] [--kills N] [--seconds BETWEEN_CHECKPOINTS]

A small language model is trained by two replicas, with a loader process each, and checkpoints of everything. Each life of
the run ends by SIGKILL: to the trainer alone, to its whole group (as a machine that goes down), to the process that writes
checkpoints or to a replica (then the trainer must give up by itself); at a random moment, a fifth of them while it starts
or restores. Two claims: the final weights are bit-identical to those of the undisturbed run; and no kill costs more
training than one interval between checkpoints (wall-clock, from the moment when the checkpoint was taken that the next life
continues from, or else from this life's first step, to the kill).

The allowance on the interval is 0.1 s: a checkpoint is taken between steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from bench._run import claim

SLACK = 0.1


def life(folder: Path, tokens: Path, steps: int, seconds: float) -> None:
    """One life of the run; tells each step and the time on a line, at last the weights."""
    import torch
    from tests.support.train.tiny import Notes, job

    from whorl.train.lm.pretrain import pretrain

    log = (folder / "log").open("a", buffering=1)

    class Telling(Notes):
        def on_checkpoint(self, step: int, seconds: float) -> None:
            print(f"taken {step} {time.time()}", file=log)

        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if not self.steps:
                print(f"trains {time.time()}", file=log)
            super().on_step(step, metrics)

    wanted = job(
        tokens, steps=steps, replicas=2, serial_loader=False, evaluations=4, batch_rows=16, length=64
    )

    def say(text: str) -> None:
        print(f"said {text}", file=log)

    model = pretrain(wanted, folder / "scratch", Telling(), checkpoint_seconds=seconds, say=say)
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        digest.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    print(f"weights {digest.hexdigest()}", file=log)


def start(folder: Path, a: argparse.Namespace) -> subprocess.Popen[bytes]:
    words = [str(folder), str(a.tokens), str(a.steps), str(a.seconds)]
    return subprocess.Popen(
        [sys.executable, __file__, "--life", *words],
        start_new_session=True,
        stderr=(folder / "errors").open("ab"),
    )


def lines(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def victims(trainer: int) -> dict[str, int]:
    """Which of the trainer's children is what."""
    found = {}
    for child in psutil.Process(trainer).children():
        try:
            words = " ".join(child.cmdline())
        except psutil.Error:
            continue
        if "whorl.train.checkpoint.writer_process" in words:
            found["the writer"] = child.pid
        elif "spawn_main" in words and any("spawn_main" in " ".join(c.cmdline()) for c in child.children()):
            found["a replica"] = child.pid  # it has a loader of its own
    return found


def strike(process: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Kills something; whom."""
    whom = rng.choice(["the trainer", "the group", "the group", "the writer", "a replica"])
    try:
        found = victims(process.pid) if whom in ("the writer", "a replica") else {}
    except psutil.Error:
        found = {}
    if whom in found:
        os.kill(found[whom], signal.SIGKILL)
        return whom
    whom = "the group" if whom == "the group" else "the trainer"
    (os.killpg if whom == "the group" else os.kill)(process.pid, signal.SIGKILL)
    return whom


def newest(folder: Path) -> int:
    return max((int(p.name[5:]) for p in (folder / "scratch").glob("step-*")), default=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--life", nargs=4)
    a = parser.parse_args()
    if a.life:
        return life(Path(a.life[0]), Path(a.life[1]), int(a.life[2]), float(a.life[3]))
    from tests.support.train.tiny import make_tokens

    a.kills = a.kills or (5 if a.quick else 50)
    a.steps = a.steps or a.kills * 150
    top = Path(tempfile.mkdtemp())
    try:
        a.tokens = make_tokens(top / "tokens", documents=400)
        chaos(a, top)
    finally:
        shutil.rmtree(top, ignore_errors=True)
    return None


def chaos(a: argparse.Namespace, top: Path) -> None:
    whole, killed = top / "whole", top / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    began = time.time()
    assert start(whole, a).wait() == 0, (whole / "errors").read_text()
    undisturbed = time.time() - began
    expected = lines(whole)[-1]
    rng, samples, taken = random.Random(a.seed), list[dict[str, Any]](), dict[int, float]()
    startup = 5.0
    while True:
        before = len(lines(killed))
        process, born = start(killed, a), time.time()
        early = rng.random() < 0.2
        moment = rng.uniform(0.0, startup) if early else rng.uniform(0.0, 2.5 * a.seconds)
        while not early and process.poll() is None:  # until it trains
            if any(line.startswith("taken") for line in lines(killed)[before:]):
                startup = time.time() - born
                break
            time.sleep(0.005)
        while process.poll() is None and time.time() - born < moment + (0 if early else startup):
            time.sleep(0.002)
        if process.poll() is not None or len(samples) == a.kills:
            status = process.wait()
            break
        struck = time.time()
        whom = strike(process, rng)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the trainer lives on though {whom} was killed") from None
        mine = lines(killed)[before:]
        for line in mine:
            if line.startswith("taken"):
                taken[int(line.split()[1])] = float(line.split()[2])
        step = newest(killed)
        # the last moment whose work is not lost: of the checkpoint that will be continued from, or this life's first step
        trained = [float(line.split()[1]) for line in mine if line.startswith("trains")]
        kept = max([taken.get(step, 0.0), *trained]) if trained else struck
        samples.append({"kill": len(samples) + 1, "whom": whom, "life_s": round(struck - born, 2), "continues_at": step,
                        "lost_s": round(max(0.0, struck - kept), 3)})  # fmt: skip
        print(samples[-1], flush=True)
    found = lines(killed)[-1]
    said = [line for line in lines(killed) if line.startswith("said") and "rejected" in line]
    same = status == 0 and found == expected and found.startswith("weights")
    if not same:
        print((killed / "errors").read_text()[-3000:], found, expected)
    worst = max((s["lost_s"] for s in samples), default=0.0)
    print(json.dumps({"undisturbed_s": round(undisturbed, 1), "passed_over": said, "median_lost_s":
                      median(s["lost_s"] for s in samples) if samples else 0.0}))  # fmt: skip
    claim(f"killed {len(samples)} times at random: final weights bit-identical", ours=len(samples), peer=a.kills,
          unit="kills", ratio=float(same), bar=1.0, ok=same and len(samples) == a.kills, samples=samples,
          quick=a.quick)  # fmt: skip
    claim("training lost at a kill, the worst, against the time between checkpoints", ours=worst, peer=a.seconds, unit="s",
          ratio=worst / a.seconds, bar=1.0 + SLACK / a.seconds, ok=worst <= a.seconds + SLACK, quick=a.quick)  # fmt: skip


if __name__ == "__main__":
    main()
