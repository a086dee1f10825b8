"""Seconds until a child process with torch answers, and until a process has loaded a model.

    python bench/machine/process_start.py [--rounds 7]
    python bench/machine/process_start.py --quick      # three rounds

    spawn      `multiprocessing` with its "spawn" method: a new interpreter imports torch (the peer)
    first      the first child of the fork server, which imports torch once
    next       every further child (`machine/process.py`)
    load       a new process that imports Whorl and loads a small model (`nn/compiler.py`)

Each child receives a message and sends it back. Median of the rounds.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench._run import claim, parse

from whorl.machine import fork_server
from whorl.machine.process import Channel, Child
from whorl.models import make_model, save_model, whorl_decoder

LOAD = "import sys, pathlib; from whorl.models import load_model; load_model(pathlib.Path(sys.argv[1]))"


def answer(channel: Channel | Connection) -> None:
    """Send one message back, computed with torch."""
    channel.send(int(torch.tensor(channel.recv()) + 1))


def seconds(start: Callable[[], Any]) -> float:
    began = time.perf_counter()
    start()
    return time.perf_counter() - began


def spawned() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,))
    process.start()
    ours.send(1)
    assert ours.recv() == 2
    process.join()


def child() -> None:
    started = Child("bench.machine.process_start:answer", preload=("torch", "bench.machine.process_start"))
    started.channel.send(1)
    assert started.channel.recv() == 2
    started.close()


def main() -> None:
    smoke, quick = {"rounds": 1}, {"rounds": 3}
    a = parse(__doc__, lambda p: p.add_argument("--rounds", type=int, default=7), smoke=smoke, quick=quick)
    if not fork_server.available():
        print("there is no fork server on this system")
        raise SystemExit(77)
    first = seconds(child)
    spawn, forked = [], []
    for _ in range(a.rounds):
        spawn.append(seconds(spawned))
        forked.append(seconds(child))
    with tempfile.TemporaryDirectory() as folder:
        shape = whorl_decoder(vocab_size=300, d_model=64, n_layers=2, n_heads=2, n_kv_heads=2, mlp_hidden=128)
        save_model(make_model(shape, torch.Generator().manual_seed(0)), Path(folder))
        command = [sys.executable, "-c", LOAD, folder]
        load = [
            seconds(lambda: subprocess.run(command, check=True, env={**os.environ})) for _ in range(a.rounds)
        ]
    print(
        f"spawn {median(spawn):.3f} s, first {first:.3f} s, next {median(forked):.4f} s, load {median(load):.2f} s"
    )
    claim(
        "start of a child process with torch", ours=median(forked), peer=median(spawn), unit="s",
        ratio=median(spawn) / median(forked), bar=10, ok=median(spawn) > 10 * median(forked), samples=forked,
        peer_name="multiprocessing, spawn", quick=a.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
