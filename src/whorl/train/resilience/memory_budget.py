"""Activation budget: the number of blocks to recompute in the backward (`models/activation_checkpointing.py`).

The budget covers all replicas together, as `batch_size` does. It bounds the activations that a forward keeps for the
backward of one micro-batch, without logits and loss (`objectives/next_token.py` never materializes all logits). Weights,
gradients, moments and temporaries of operations are not included.

A block's activations are measured on one row and on two rows, plain and packed; the larger value counts. A formula
would have to hold for every mixer on every device. The measurement is uncompiled. A compiled trunk keeps up to a fifth
less, so it stays within the budget and recomputes at most one block more than necessary.

Functorch's `activation_memory_budget` is not used: it has no effect in eager mode, is a fraction rather than bytes, and
at 0.7 it kept 0.57. The compiler also handles checkpointed blocks, with the same bytes as in eager mode.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl.errors import BudgetError
from whorl.machine.memory import Memory, MemoryText, device_memory
from whorl.models.activation_checkpointing import (
    LinearActivationMemory,
    measure_activation_memory,
    min_checkpointed_blocks,
)

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.train.job import Job


def resolve_micro_batch_size(job: Job) -> int:
    """Rows of one forward pass of one replica."""
    rows = job.batch_size // job.replicas
    return max(1, min(job.micro_batch_size or rows, rows))


def job_activation_checkpointing(model: LanguageModel, job: Job) -> LanguageModel:
    """Apply the activation budget of a pretraining job (`apply_activation_checkpointing`); return the model."""
    from whorl.train.job import last_rows

    length = last_rows(job).seq_len
    rows = max(1, resolve_micro_batch_size(job) * job.seq_len // length)
    if job.dtype == "float8":  # products need multiples of 16 rows
        length = -(-length // 16) * 16
    return apply_activation_checkpointing(
        model, job.activation_budget, length=length, rows=rows, replicas=job.replicas
    )


def apply_activation_checkpointing(
    model: LanguageModel,
    budget: MemoryText | None,
    *,
    length: int,
    rows: int,
    replicas: int,
    step: str = "pretrain",
    rows_setting: tuple[str, int] = ("train.micro_batch_size", 1),
) -> LanguageModel:
    """Set the number of recomputed blocks of `model` so that its forward passes stay within a budget; return it.

    Args:
        budget: of all replicas together; None recomputes nothing.
        length, rows: of a forward pass with gradients.
        step, rows_setting: for the error: names of the step and of its setting, with the value of one row.

    Raises:
        BudgetError: the budget is too small; the message has the minimum and a setting that fits.
    """
    if budget is not None:
        available = Memory.parse(budget).resolve(device_memory(str(model.embedding.device)))
        model.checkpointed_blocks = blocks_to_checkpoint(
            measure_activation_memory(model, length),
            available // replicas,
            rows,
            replicas,
            step=step,
            rows_setting=rows_setting,
        )
    return model


def blocks_to_checkpoint(
    measured: LinearActivationMemory,
    budget_bytes: int,
    rows: int,
    replicas: int = 1,
    *,
    step: str = "pretrain",
    rows_setting: tuple[str, int] = ("train.micro_batch_size", 1),
) -> int:
    """Return the number of blocks, counted from the first, to recompute in forward passes of `rows` rows.

    Args:
        measured: result of `measure_activation_memory`.
        budget_bytes: per replica.
        replicas: for the error message, which states the total.
        step, rows_setting: as for `apply_activation_checkpointing`.

    Raises:
        BudgetError: as for `apply_activation_checkpointing`.
    """
    activations = measured.at_rows(rows)
    if activations.min_peak <= budget_bytes:
        return min_checkpointed_blocks(activations, budget_bytes)
    fewer = [n for n in range(1, rows) if measured.at_rows(n).min_peak <= budget_bytes]
    remedies = [f"--set {step}.run.activation_budget={megabytes(activations.min_peak * replicas)}MB"]
    if fewer:
        remedies.append(
            f"--set {step}.{rows_setting[0]}={fewer[-1] * rows_setting[1]} (now {rows} rows per forward; the same steps "
            "up to rounding)"
        )
    raise BudgetError(
        f"{step}.run.activation_budget is {megabytes(budget_bytes * replicas, up=False)} MB"
        + (f" for {replicas} replicas" if replicas > 1 else "")
        + f", but {rows} rows per forward need more, even if all blocks are recomputed",
        expected=f"at least {megabytes(activations.min_peak * replicas)} MB; no block is recomputed from "
        f"{megabytes(activations.peak(0) * replicas)} MB up",
        do="one of: " + "; ".join(remedies) + "; --set plan.data.seq_len=... (shorter rows)",
    )


def megabytes(n_bytes: float, *, up: bool = True) -> str:
    """Format bytes in tenths of a megabyte, rounded up (or down), so that the printed value suffices."""
    tenths = -(-int(n_bytes) // 10**5) if up else int(n_bytes) // 10**5
    return f"{tenths / 10:.1f}"
