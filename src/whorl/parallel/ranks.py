"""Run a function on several ranks of this machine under torch.distributed, and collect what it returns.

    run_ranks(4, mean_over_ranks, tensor)      mean_over_ranks(tensor) on ranks 0 to 3; a list of four results

The default process group is ready when the function starts. Each rank is a new process with one thread.
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from whorl.machine.process import Channel, Child, wait_for
from whorl.parallel.process_group import ReplicaError

TIMEOUT = 120.0  # seconds, for the whole call and for each collective


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    backend: str = "gloo",
    timeout: float = TIMEOUT,
    preload: Sequence[str] = (),
) -> list[Any]:
    """Return function(*args) of every rank, in rank order. Function, arguments and results are pickled.

    backend: of torch.distributed; "fake" sends nothing. preload: modules that ranks find imported (`machine/process.py`).

    Raises:
        ReplicaError: a rank raised (with its traceback), died or did not end within `timeout` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="whorl-ranks-") as folder:
        meeting = str(Path(folder) / "store")
        children = [
            Child(
                f"{__name__}:run_rank", rank, size, meeting, backend, timeout, function, args,
                name=f"rank {rank}", preload=(__name__, *preload), share_tensors=False,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            return _collect(children, time.monotonic() + timeout)
        finally:
            for child in children:
                child.kill()
                child.channel.close()


def _collect(children: list[Child], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    failed: dict[int, str] = {}
    while len(results) < len(children):
        waiting = {child.channel: rank for rank, child in enumerate(children) if rank not in results}
        # After a failure for a moment: the error of a rank that loses its peer may come first.
        seconds = deadline - time.monotonic() if not failed else 0.2
        ready = wait_for(
            [c for c, rank in waiting.items() if rank not in failed], max(0.0, seconds), children
        )
        if not ready and failed:
            raise ReplicaError("\n".join(failed.values()))
        if not ready:
            raise ReplicaError(f"ranks {sorted(waiting.values())} did not end in time")
        for channel in ready:
            rank = waiting[channel]
            try:
                ok, value = pickle.loads(channel.recv_bytes())
            except (EOFError, OSError):
                children[rank].wait(2)
                ok, value = False, f"{children[rank].exit_description()} without a result"
            if ok:
                results[rank] = value
            else:
                failed[rank] = f"rank {rank} failed:\n{value}"
    return [results[rank] for rank in range(len(children))]


def run_rank(
    channel: Channel, rank: int, size: int, meeting: str, backend: str, timeout: float,
    function: Callable[..., Any], args: tuple[Any, ...],
) -> None:  # fmt: skip
    """Main function of a rank."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    try:
        store = None if backend == "fake" else dist.FileStore(meeting, size)  # type: ignore[attr-defined]
        if store is None:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            store = FakeStore()
        dist.init_process_group(
            backend, rank=rank, world_size=size, store=store, timeout=timedelta(seconds=timeout)
        )
        result = (True, function(*args))
    except Exception:
        result = (False, traceback.format_exc())
    channel.send_bytes(
        pickle.dumps(result)
    )  # `send` would share the memory of tensors, which ends with this process
    if dist.is_initialized():
        dist.destroy_process_group()
