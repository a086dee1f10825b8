"""Activations within a budget: how many blocks of a job's model are remade in the backward (`models/activation_checkpointing.py`).

The budget is of all replicas together, as `batch_rows` is: on one machine they share the memory. It is over what the
forward keeps for the backward, one micro-batch at a time, logits and loss left out (`objectives/next_token.py` never holds
all logits). Weights, gradients and moments are not in it, nor what an operation needs while it runs.

What a block keeps is measured on one and on two rows, plain and packed, and the larger taken: a formula would have to be
true of every mixer on every device. Measured uncompiled. A compiled trunk keeps up to a fifth less, so it stays within the
budget too, and remakes a block more than it had to at most.

Why not the compiler's own dial (`activation_memory_budget` of functorch, a share between all and nothing that its
partitioner is to keep). It does nothing in eager execution, is no number of bytes before everything is compiled, and at a
dial of 0.7 was seen to keep 0.57; checkpointed blocks are seen by the compiler too, and give it the same bytes as in eager
execution.

    python bench/train/activation_memory.py        bytes against time, for budgets from all to none
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl.errors import BudgetError
from whorl.machine.memory import Memory, device_memory
from whorl.models.activation_checkpointing import (
    LinearActivationMemory,
    measure_activation_memory,
    min_checkpointed_blocks,
)

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.train.job import Job


def resolve_micro_batch_size(job: Job) -> int:
    """Rows that one replica takes in one forward."""
    rows = job.batch_size // job.replicas
    return max(1, min(job.micro_batch_size or rows, rows))


def apply_activation_checkpointing(model: LanguageModel, job: Job) -> LanguageModel:
    """`model`, told how many of its blocks to remake so that a forward of `job` keeps no more than its budget.

    Raises:
        BudgetError: it cannot be met; names the least that can, and rows a forward with which it would be.
    """
    if job.activation_budget is not None:
        # Products in fp8 want sixteens of rows; one row of another length would be seen without them.
        length = -(-job.seq_len // 16) * 16 if job.dtype == "float8" else job.seq_len
        allowed = Memory.parse(job.activation_budget).resolve(device_memory(job.device)) // job.replicas
        model.checkpointed_blocks = blocks_to_checkpoint(
            measure_activation_memory(model, length), allowed, resolve_micro_batch_size(job), job.replicas
        )
    return model


def blocks_to_checkpoint(
    measured: LinearActivationMemory, budget_bytes: int, rows: int, replicas: int = 1
) -> int:
    """How many blocks, from the first, are remade in forwards of `rows` rows. Pure.

    Args:
        seen: what `measure` found. allowed: bytes for each replica. replicas: for the error, which speaks of all.

    Raises:
        BudgetError: as `within_budget`.
    """
    kept = measured.at_rows(rows)
    if kept.min_peak <= budget_bytes:
        return min_checkpointed_blocks(kept, budget_bytes)
    fewer = [n for n in range(1, rows) if measured.at_rows(n).min_peak <= budget_bytes]
    cures = [f"--set pretrain.activation_budget={megabytes(kept.min_peak * replicas)}MB"]
    if fewer:
        cures.append(
            f"--set pretrain.micro_rows={fewer[-1]} (now {rows} rows a forward; the same steps up to rounding)"
        )
    raise BudgetError(
        f"pretrain.activation_budget is {megabytes(budget_bytes * replicas, up=False)} MB"
        + (f" for {replicas} replicas" if replicas > 1 else "")
        + f", and {rows} rows a forward need more, whatever is remade",
        expected=f"at least {megabytes(kept.min_peak * replicas)} MB; nothing is remade from "
        f"{megabytes(kept.peak(0) * replicas)} MB on",
        do="one of: " + "; ".join(cures) + "; --set plan.length=... (shorter rows)",
    )


def megabytes(n_bytes: float, *, up: bool = True) -> str:
    """In tenths of a megabyte, rounded up, so that what is typed suffices (or down)."""
    tenths = -(-int(n_bytes) // 10**5) if up else int(n_bytes) // 10**5
    return f"{tenths / 10:.1f}"
