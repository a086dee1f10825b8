"""Loss and gradient of a chunk of logits in C++ (`cross_entropy.cpp`), in one reading: a `LogitsStep` of `next_token`.

Logits are bf16 or fp32.

`choose_logits_step` times it before a step is compiled. The compiled loss is fused with other operations and cannot be
timed alone. So the candidate in its place is torch's softmax of the same logits, which is a part of that work.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from whorl.machine.kernel_choice import fastest
from whorl.nn.cpu.library import choice_table, is_supported, native_library, short_name

_chosen: dict[tuple[torch.dtype, int], bool] = (
    choice_table()
)  # type and vocabulary -> whether the kernel was the fastest


def is_chosen(hidden: Tensor, vocabulary: int, softcap: float | None) -> bool:
    """Return whether logits of these hidden states should run here."""
    return softcap is None and is_supported(hidden) and _chosen.get((hidden.dtype, vocabulary), False)


def logits_step(
    logits: Tensor, targets: Tensor, keep: Tensor, z_loss: float, _softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a `LogitsStep` without a softcap; the gradient overwrites the logits."""
    sums = cross_entropy_(logits, targets, keep, z_loss)
    return sums[0], sums[1], logits


@torch.library.custom_op("whorl::cross_entropy_", mutates_args=("logits",))
def cross_entropy_(logits: Tensor, targets: Tensor, keep: Tensor, z_loss: float) -> Tensor:
    """Overwrite logits [n, V] with the gradient of the total; return total and negative log-likelihood, [2] fp32.

    Raises:
        MemoryError: there is no memory for a row.
    """
    library = native_library("cross_entropy")
    assert library is not None  # or it would not have been chosen
    ids, weight, sums = targets.contiguous(), keep.float().contiguous(), torch.empty(2)
    failed = library.whorl_cross_entropy(
        ctypes.c_void_p(logits.data_ptr()),
        ctypes.c_void_p(ids.data_ptr()),
        ctypes.c_void_p(weight.data_ptr()),
        *(ctypes.c_int64(n) for n in logits.shape),
        ctypes.c_float(z_loss),
        ctypes.c_void_p(sums.data_ptr()),
        ctypes.c_int32(logits.dtype == torch.float32),
        ctypes.c_int32(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError(f"cross-entropy of {logits.shape[1]} logits: no memory for a row")
    return sums


@cross_entropy_.register_fake
def _(logits: Tensor, targets: Tensor, keep: Tensor, z_loss: float) -> Tensor:
    return logits.new_empty(2, dtype=torch.float32)


def choose_logits_step(rows: int, vocabulary: int, dtype: torch.dtype) -> str:
    """Time the ways for chunks of logits [rows, vocabulary] in bf16 or fp32 on a CPU. Returns "compiled" or "native"."""
    values = torch.arange(rows * vocabulary).remainder(97).sub(48).div(12).to(dtype).view(rows, vocabulary)
    targets, keep = torch.arange(rows) % vocabulary, torch.ones(rows)
    candidates = {"compiled": lambda: values.float().softmax(-1).to(dtype)}
    if native_library("cross_entropy") is not None:
        candidates["native"] = lambda: logits_step(values, targets, keep, 1e-4, None)[0]  # any values do
    chosen = fastest(f"cross_entropy {rows}x{vocabulary} {short_name(dtype)}", candidates)
    _chosen[dtype, vocabulary] = chosen == "native"
    return chosen
