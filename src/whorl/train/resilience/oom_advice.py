"""Out of memory: which setting to change, and from what to what.

The ways in which memory runs out are many (Python's MemoryError, torch's allocators, the kernel that kills the largest
process, /dev/shm too small for what replicas share), the cure is nearly always one of four numbers.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from whorl.errors import WhorlError
from whorl.machine.memory import Memory
from whorl.parallel.process_group import ReplicaError
from whorl.train.resilience.memory_budget import resolve_micro_batch_size

if TYPE_CHECKING:
    from whorl.train.job import Job

P = ParamSpec("P")
T = TypeVar("T")

# As torch's allocators on CPU and CUDA, C++ and the kernel say it.
OOM_PATTERNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc", "MemoryError",
         "unable to allocate", "CUBLAS_STATUS_ALLOC_FAILED")  # fmt: skip
SHM_PATTERNS = (
    "unable to mmap",
    "shared memory",
    "/dev/shm",
    "torch_shm",
    "unable to open shared memory object",
)


class OutOfMemoryError(WhorlError):
    """There was not enough memory for what was asked."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says, in whatever words, that memory ran out."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, ReplicaError) and error.killed:
        return True
    if not isinstance(error, RuntimeError | OSError | ReplicaError):
        return False
    text = str(error).lower()
    return any(sign.lower() in text for sign in (*OOM_PATTERNS, *SHM_PATTERNS))


def suggest(error: BaseException, job: Job) -> OutOfMemoryError:
    """What to change in `job` so that it fits."""
    micro = resolve_micro_batch_size(job)
    logits = micro * job.seq_len * job.model.vocab_size * 4
    text = str(error)
    first = text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    cures = []
    if isinstance(error, ReplicaError) and error.killed:
        what = f"{error.what.splitlines()[0]}; on a machine whose memory is full that is the system's doing"
        first = ""
    elif any(sign in text.lower() for sign in SHM_PATTERNS):
        what = "there is no room for the memory that replicas share"
        cures.append("make /dev/shm larger (docker run --shm-size=8g)")
    else:
        what = "the device has no memory left" if job.device != "cpu" else "memory ran out"
    if micro > 1:
        cures.append(
            f"--set pretrain.micro_rows={micro // 2} (now {micro} rows a forward; the same steps up to rounding)"
        )
    if job.activation_budget is None:
        cures.append(
            "--set pretrain.activation_budget=25% (now none: no activation is computed again to save memory)"
        )
    else:
        less = Memory.parse(job.activation_budget).halved()
        cures.append(f"--set pretrain.activation_budget={less} (now {job.activation_budget})")
    if job.batch_size > job.replicas:
        cures.append(
            f"--set plan.batch_rows={max(job.replicas, job.batch_size // 2)} (now {job.batch_size} rows a step)"
        )
    cures.append(f"--set plan.length={max(16, job.seq_len // 2)} (now {job.seq_len} tokens a row)")
    if job.replicas > 1:
        cures.append(f"--set plan.replicas={job.replicas // 2} (now {job.replicas}, each with its own)")
    return OutOfMemoryError(
        what + (f": {first}" if first else ""),
        expected=(
            f"room for {micro} rows of {job.seq_len} tokens at a time in each of {job.replicas} replicas "
            f"(their logits alone: {logits / 1e6:,.0f} MB)"
        ),
        do="one of: " + "; ".join(cures) + ". Under another setting than activation_budget a run begins anew",
    )


def with_oom_advice(work: Callable[Concatenate[Job, P], T]) -> Callable[Concatenate[Job, P], T]:
    """`work`, with advice in place of what is raised when memory runs out.

    Raises:
        MemoryFullError: it ran out.
    """

    @functools.wraps(work)
    def call(job: Job, /, *args: P.args, **options: P.kwargs) -> T:
        try:
            return work(job, *args, **options)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise suggest(error, job) from error

    return call
