"""Twenty SIGKILLs of ranks, agents and checkpoint writers end in the bits of the undisturbed run, and nothing stays behind.

    python bench/parallel/elastic.py [--kills N] [--steps N] [--on torchrun|ray]

`whorl launch --deterministic` trains a tiny model on two ranks. Victims take turns: rank 1, the writer, rank 0, the agent.
After the kill of a rank or a writer all ranks must start again without help. After that of the agent its ranks must end,
and the same command continues, as a scheduler would start it. A fifth of the kills hit the start. Compared are the weights
of a run of shared memory that nothing disturbs. Afterwards no marked process may be left, and no temporary file
that the undisturbed run does not leave, too. Under Ray the ranks alone are killed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench._run import claim, parse
from tests.support.cli import weights, whorl_command
from tests.support.parallel.kills import MARK, reached_step, roles, write_recipe

from whorl.store import Store

VICTIMS = {"torchrun": ("rank 1", "writer 0", "rank 0", "agent"), "ray": ("rank 1", "rank 0")}
MODEL = "small/pretrain"


def start(folder: Path, on: str) -> subprocess.Popen[bytes]:
    temporary = folder / "temporary"
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, MARK: str(folder), "TMPDIR": str(temporary)}
    words = ("launch", "small.toml", "--deterministic", "--store", "killed", "--on", on, "--ranks", 2)
    log = (folder / "log").open("ab")
    return subprocess.Popen(
        whorl_command(*words, "--restarts", 100), cwd=folder, env=environment, stdout=log, stderr=log
    )


def await_victim(folder: Path, run: subprocess.Popen[bytes], victim: str, last: int) -> int:
    """Return the process id of a victim, once training has passed step `last`; -1: from the start on."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if run.poll() is not None:
            raise SystemExit(
                f"the run ended with {run.returncode}; more --steps. {(folder / 'log').read_text()[-2000:]}"
            )
        found = roles(str(folder))
        if reached_step(folder / "killed") > last and victim in found:
            return found[victim].pid
        time.sleep(0.05)
    raise SystemExit(f"no {victim} after step {last}: {(folder / 'log').read_text()[-2000:]}")


def await_end(folder: Path) -> list[str]:
    """Return the roles of the run that are still there after 20 s."""
    deadline = time.monotonic() + 20
    while (found := roles(str(folder))) and time.monotonic() < deadline:
        time.sleep(0.1)
    return [*found]


def main(arguments: argparse.Namespace, folder: Path) -> None:
    rng = random.Random(0)
    write_recipe(folder, arguments.steps)
    undisturbed = ("launch", "small.toml", "--deterministic", "--store", "whole", "--ranks", 2)
    (folder / "temporary-whole").mkdir()
    environment = {**os.environ, "TMPDIR": str(folder / "temporary-whole")}
    subprocess.run(
        whorl_command(*undisturbed), cwd=folder, check=True, stdout=subprocess.DEVNULL, env=environment
    )
    shutil.copytree(folder / "whole", folder / "killed")
    shutil.rmtree(Store(folder / "killed").open(MODEL).path)
    shutil.rmtree(folder / "killed" / "runs")
    run, last, left, samples = start(folder, arguments.on), 0, list[str](), list[tuple[str, int]]()
    for number in range(arguments.kills):
        victim = VICTIMS[arguments.on][number % len(VICTIMS[arguments.on])]
        at_start = number % 5 == 4 and not victim.startswith("writer")
        while True:
            pid = await_victim(folder, run, victim, -2 if at_start else last)
            time.sleep(rng.random() * (0.5 if at_start else 0.2))
            with suppress(ProcessLookupError):  # one of the start before, which has just ended
                os.kill(pid, 9)
                break
        last = max(last, reached_step(folder / "killed"))
        samples.append((victim, last))
        print(f"kill {number + 1}: {victim} at step {last}", flush=True)
        if victim == "agent":
            run.wait()
            left += await_end(folder)
            run = start(folder, arguments.on)
        else:
            while victim.startswith("rank") and (now := roles(str(folder)).get(victim)) and now.pid == pid:
                time.sleep(0.05)
    code = run.wait()
    files = [{path.name for path in (folder / name).iterdir()} for name in ("temporary", "temporary-whole")]
    left += [*await_end(folder), *(files[0] - files[1])]
    print((folder / "log").read_text()[-1500:])
    equal = code == 0 and weights(folder / "killed", MODEL) == weights(folder / "whole", MODEL)
    claim(
        f"bits of the weights after {arguments.kills} SIGKILLs under {arguments.on} are those of the undisturbed run",
        ours=float(equal), peer=1.0, unit="equal", ratio=float(equal), bar=1.0, ok=equal and not left,
        samples=[*samples, *(("left", name) for name in left)], variant=arguments.on,
    )  # fmt: skip


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--on", choices=[*VICTIMS], default="torchrun")


if __name__ == "__main__":
    options = parse(__doc__, add, smoke={"kills": 1, "steps": 150})
    with tempfile.TemporaryDirectory() as name:
        main(options, Path(name))
