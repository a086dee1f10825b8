"""A run that is killed fifty times at random moments ends with the weights of an undisturbed run.

    python bench/train/chaos.py --quick          # two kills
    python bench/train/chaos.py [--kills N] [--seconds BETWEEN_CHECKPOINTS]
    python bench/train/chaos.py --deterministic  # a job long enough to time kernels; their cache is deleted between kills

Two replicas train a small language model, with a loader process each, and checkpoint all state. Each life of the run
ends by SIGKILL at a random moment; a fifth of the kills hit start-up or restore. The victim is the trainer, its whole
process group (like a machine failure), the checkpoint writer, or a replica. In the last two cases the trainer must exit
without help.

There are two claims. The final weights are bit-identical to those of the undisturbed run. No kill costs more training
than one interval between checkpoints. Lost training is wall-clock time up to the kill. It starts when the checkpoint
was taken from which the next life continues, or else at this life's first step.

Without `--deterministic` a job of 15 kills or more times its kernels. The killed run begins with the choices of the
undisturbed one, and keeps them with its checkpoints. With `--deterministic` the job has a million steps and ends after those
of the run. So a rank that timed a kernel would leave a file in the cache of choices: none may appear, and each life begins
without the cache.

The tolerance on the interval is 0.1 s, because a checkpoint is taken between steps.
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
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
from bench._run import claim, parse, sized, smoke

SLACK = 0.1
LONG = 10**6  # steps of a job above `train.lm.kernels.MIN_TIMED_FLOPS`; the run ends before


def life(folder: Path, tokens: Path, steps: int, seconds: float, deterministic: bool) -> None:
    """One life of the run. Logs checkpoints and the first step with their times, and finally the hash of the weights."""
    import torch
    from tests.support.train.tiny import Notes, job

    from whorl.train.lm.kernels import MIN_TIMED_FLOPS
    from whorl.train.lm.pretrain import pretrain

    log = (folder / "log").open("a", buffering=1)

    class Logger(Notes):
        def on_checkpoint(self, step: int, seconds: float) -> None:
            print(f"checkpoint {step} {time.time()}", file=log)

        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if not self.steps:
                print(f"first-step {time.time()}", file=log)
            super().on_step(step, metrics)

    settings = job(
        tokens,
        steps=LONG if deterministic else steps,
        replicas=2 if deterministic else sized(2, 1),
        serial_loader=smoke(),
        evaluations=4 * LONG // steps if deterministic else 4,
        deterministic=deterministic,
        batch_size=16,
        seq_len=64,
    )

    def write_log(text: str) -> None:
        print(f"log {text}", file=log)

    model = pretrain(
        settings, folder / "scratch", Logger(), checkpoint_seconds=seconds, log=write_log, stop_after=steps
    )
    if deterministic:
        work = LONG * settings.batch_size * settings.seq_len * model.flops_per_token(settings.seq_len)
        assert work > MIN_TIMED_FLOPS, "the job is too short to time kernels"
    digest = hashlib.sha256()
    for _, p in sorted(model.named_parameters()):
        digest.update(p.detach().contiguous().view(torch.uint8).numpy().tobytes())
    print(f"weights {digest.hexdigest()}", file=log)


def start(folder: Path, a: argparse.Namespace) -> subprocess.Popen[bytes]:
    life_arguments = [str(folder), str(a.tokens), str(a.steps), str(a.seconds)]
    flags = ["--deterministic"] if a.deterministic else []
    return subprocess.Popen(
        [sys.executable, __file__, "--life", *life_arguments, *flags],
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")} if a.deterministic else None,
        start_new_session=True,
        stderr=(folder / "errors").open("ab"),
    )


def lines(folder: Path) -> list[str]:
    log = folder / "log"
    return log.read_text().splitlines() if log.exists() else []


def drop_choices(folder: Path) -> list[str]:
    """Delete the cache of choices of a deterministic run; return the names of the files that held some."""
    found = [path.name for path in (folder / "cache").rglob("kernels-*.json")]
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return found


def victims(trainer: int) -> dict[str, int]:
    """Process ids of the trainer's children by role."""
    found = {}
    for child in psutil.Process(trainer).children(recursive=True):
        with suppress(psutil.Error):
            found[child.name().split()[0]] = child.pid  # "checkpoints", "replica 1"
    return found


def strike(process: subprocess.Popen[bytes], rng: random.Random) -> str:
    """Kill a random process; returns its role."""
    victim = rng.choice(["trainer", "group", "group", "checkpoints", "replica"])
    try:
        found = victims(process.pid) if victim in ("checkpoints", "replica") else {}
    except psutil.Error:
        found = {}
    if victim in found:
        os.kill(found[victim], signal.SIGKILL)
        return victim
    victim = "group" if victim == "group" else "trainer"
    (os.killpg if victim == "group" else os.kill)(process.pid, signal.SIGKILL)
    return victim


def newest(folder: Path) -> int:
    return max((int(p.name[5:]) for p in (folder / "scratch").glob("step-*")), default=0)


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--kills", type=int, default=50)
        parser.add_argument("--steps", type=int)
        parser.add_argument("--seconds", type=float, default=0.8)
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--deterministic", action="store_true")
        parser.add_argument("--life", nargs=4, help=argparse.SUPPRESS)

    smoke_sizes = {"kills": 1, "steps": 40, "seconds": 0.3}
    a = parse(__doc__, arguments, smoke=smoke_sizes, quick={"kills": 2})
    if a.life:
        return life(Path(a.life[0]), Path(a.life[1]), int(a.life[2]), float(a.life[3]), a.deterministic)
    from tests.support.train.tiny import make_tokens

    a.steps = a.steps or a.kills * 150
    top = Path(tempfile.mkdtemp())
    try:
        a.tokens = make_tokens(top / "tokens", documents=sized(400, 60))
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
    undisturbed, timed = time.time() - began, drop_choices(whole)
    expected = lines(whole)[-1]
    if (kept := whole / "scratch" / "choices").is_dir():  # a busy machine may choose others in another run
        shutil.copytree(kept, killed / "scratch" / "choices")
    rng, samples, taken = random.Random(a.seed), list[dict[str, Any]](), dict[int, float]()
    startup = 5.0
    while True:
        before = len(lines(killed))
        process, born = start(killed, a), time.time()
        early = rng.random() < 0.2
        moment = rng.uniform(0.0, startup) if early else rng.uniform(0.0, 2.5 * a.seconds)
        while not early and process.poll() is None:  # until the first checkpoint
            if any(line.startswith("checkpoint") for line in lines(killed)[before:]):
                startup = time.time() - born
                break
            time.sleep(0.005)
        while process.poll() is None and time.time() - born < moment + (0 if early else startup):
            time.sleep(0.002)
        if process.poll() is not None or len(samples) == a.kills:
            status = process.wait()
            break
        struck = time.time()
        victim = strike(process, rng)
        try:
            process.wait(timeout=120)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the trainer still runs after the {victim} was killed") from None
        timed += drop_choices(killed)
        new_lines = lines(killed)[before:]
        for line in new_lines:
            if line.startswith("checkpoint"):
                taken[int(line.split()[1])] = float(line.split()[2])
        step = newest(killed)
        # the end of the work that is kept: the checkpoint of the next life, or this life's first step
        trained = [float(line.split()[1]) for line in new_lines if line.startswith("first-step")]
        kept = max([taken.get(step, 0.0), *trained]) if trained else struck
        samples.append({"kill": len(samples) + 1, "victim": victim, "life_s": round(struck - born, 2), "continues_at": step,
                        "lost_s": round(max(0.0, struck - kept), 3)})  # fmt: skip
        print(samples[-1], flush=True)
    found = lines(killed)[-1]
    rejections = [line for line in lines(killed) if line.startswith("log ") and "rejected" in line]
    timed += drop_choices(killed)
    same = status == 0 and found == expected and found.startswith("weights") and not timed
    if not same:
        print((killed / "errors").read_text()[-3000:], found, expected, timed)
    mode = "deterministic" if a.deterministic else ""
    worst = max((s["lost_s"] for s in samples), default=0.0)
    print(json.dumps({"undisturbed_s": round(undisturbed, 1), "rejected": rejections, "median_lost_s":
                      median(s["lost_s"] for s in samples) if samples else 0.0}))  # fmt: skip
    claim(f"killed {len(samples)} times at random: final weights bit-identical", ours=len(samples), peer=a.kills,
          unit="kills", ratio=float(same), bar=1.0, peer_name="planned", variant=mode or "weights",
          ok=same and len(samples) == a.kills,
          samples=samples,
          quick=a.quick)  # fmt: skip
    claim("most training lost by one kill", ours=worst, variant=mode and f"{mode} interval",
          peer=a.seconds, unit="s", peer_name="checkpoint interval",
          ratio=worst / a.seconds, bar=1.0 + SLACK / a.seconds, ok=worst <= a.seconds + SLACK, quick=a.quick)  # fmt: skip


if __name__ == "__main__":
    main()
