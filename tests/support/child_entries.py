"""Functions that the tests of child processes run in a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from whorl.machine.process import Channel


def echo(channel: Channel, *args: Any) -> None:
    """Send the arguments, then each message, back."""
    channel.send(args)
    while True:
        channel.send(channel.recv())


def describe(channel: Channel, read: Any) -> None:
    """Send what the child inherits."""
    channel.send({
        "directory": str(Path.cwd()), "variable": os.environ.get("CHILD_TEST"), "nice": os.nice(0),
        "cores": os.sched_getaffinity(0), "path": sys.path[0], "value": read, "session": os.getsid(0) == os.getpid(),
        "sigterm": signal.getsignal(signal.SIGTERM) == signal.SIG_IGN,
        "name": Path("/proc/self/comm").read_text().strip(), "torch_threads": _threads(),
    })  # fmt: skip


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def add_one(channel: Channel, tensors: list[Any], fds: list[int], pipe: Connection) -> None:
    """Add 1 to shared tensors, write into files, send through a pipe."""
    for tensor in tensors:
        tensor += 1
    for fd in fds:
        os.write(fd, b"x")
    pipe.send("done")
    channel.send("done")


def exit_with(channel: Channel, how: str) -> None:
    if how == "raise":
        raise ValueError("the child's own words")
    if how == "exit":
        sys.exit(3)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "close":
        channel.recv()


def hang(channel: Channel, holding_gil: bool = False) -> None:
    """Start a grandchild, send both process ids, then never read the channel."""
    grandchild = subprocess.Popen(["sleep", "600"])
    channel.send((os.getpid(), grandchild.pid))
    if holding_gil:
        pow(3, 10**9)  # one operation of minutes
    time.sleep(600)
