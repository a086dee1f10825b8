"""Out of memory: error messages with the setting to reduce and its new value.

Memory runs out in many ways: Python's MemoryError, torch's allocators, the kernel's OOM killer, a small /dev/shm. The
remedy is nearly always one of four settings.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from whorl.errors import WhorlError
from whorl.machine.memory import Memory
from whorl.parallel.process_group import ReplicaError
from whorl.train.resilience.memory_budget import resolve_micro_batch_size

if TYPE_CHECKING:
    from whorl.train.job import Job

# Message fragments of torch's allocators on CPU and CUDA, of C++ and of the kernel.
OOM_PATTERNS = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory", "bad_alloc",
         "MemoryError", "unable to allocate", "CUBLAS_STATUS_ALLOC_FAILED")  # fmt: skip
SHM_PATTERNS = (
    "unable to mmap",
    "shared memory",
    "/dev/shm",
    "torch_shm",
    "unable to open shared memory object",
)


class OutOfMemoryError(WhorlError):
    """Memory ran out."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is any form of out of memory."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    if isinstance(error, ReplicaError) and error.killed:
        return True
    if not isinstance(error, RuntimeError | OSError | ReplicaError):
        return False
    text = str(error).lower()
    return any(sign.lower() in text for sign in (*OOM_PATTERNS, *SHM_PATTERNS))


def describe(error: BaseException, device: str) -> tuple[str, list[str]]:
    """Return (what happened, remedies outside of the settings)."""
    text = str(error)
    if isinstance(error, ReplicaError) and error.killed:
        what = f"{error.what.splitlines()[0]}; if the machine's memory is full, the kernel does this"
        return what, ["run the same command again, which continues from the last checkpoint"]
    first = text.strip().splitlines()[-1] if text.strip() else type(error).__name__
    if any(sign in text.lower() for sign in SHM_PATTERNS):
        what = "/dev/shm is too small for the replicas' shared memory"
        return f"{what}: {first}", ["enlarge /dev/shm (docker run --shm-size=8g)"]
    return f"{'the device has no memory left' if device != 'cpu' else 'memory ran out'}: {first}", []


def suggest(error: BaseException, job: Job) -> OutOfMemoryError:
    """Return an error that lists the settings of `job` to reduce."""
    micro = resolve_micro_batch_size(job)
    logits = micro * job.seq_len * job.model.vocab_size * 4
    what, remedies = describe(error, job.device)
    if micro > 1:
        remedies.append(
            f"--set pretrain.train.micro_batch_size={micro // 2} (now {micro} rows per forward; "
            "the same steps up to rounding)"
        )
    if job.activation_budget is None:
        remedies.append(
            "--set pretrain.run.activation_budget=25% (now none: no activation is recomputed to save memory)"
        )
    else:
        less = Memory.parse(job.activation_budget).halved()
        remedies.append(f"--set pretrain.run.activation_budget={less} (now {job.activation_budget})")
    if job.batch_size > job.replicas:
        remedies.append(
            f"--set plan.data.batch_size={max(job.replicas, job.batch_size // 2)} (now {job.batch_size} rows per step)"
        )
    remedies.append(f"--set plan.data.seq_len={max(16, job.seq_len // 2)} (now {job.seq_len} tokens per row)")
    if job.replicas > 1:
        remedies.append(
            f"--set plan.replicas={job.replicas // 2} (now {job.replicas}, each with separate activations)"
        )
    return OutOfMemoryError(
        what,
        expected=(
            f"memory for {micro} rows of {job.seq_len} tokens at a time in each of {job.replicas} replicas "
            f"(logits alone: {logits / 1e6:,.0f} MB)"
        ),
        do="one of: "
        + "; ".join(remedies)
        + ". A change of any setting but activation_budget restarts the run",
    )
