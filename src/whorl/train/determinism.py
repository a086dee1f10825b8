"""Deterministic mode: two runs of one recipe give the same bits, at a cost in speed.

Training itself uses no clock and fixed summation orders. Two runs still differ in measured choices: the plan (steps,
compilation, dtype, replicas, threads), the kernels of a step (`train/lm/kernels.py`) and the library that multiplies small
matrices (`nn/experts`). With `--deterministic` none of these is measured:

    compile       off, unless the recipe sets it (then without the compiler's kernel timing)
    dtype         float32 on a CPU, bfloat16 on a GPU, unless WHORL_DTYPE is set
    replicas      from the recipe, else one per usable core; the last bits depend on the number, so it is a part of the
                  address of a deterministic step (`recipes/runner.py`)
    kernels       those of torch, also for shapes for which an earlier job of the process has chosen others
    sampling      the engine runs torch, in the producers of rollouts too
    threads       one per replica: another number changes the order of sums
    products      MKL, never oneDNN
    steps         from the recipe or a budget of FLOPs; a budget of seconds is rejected
    torch         deterministic algorithms only (an operation without one raises), no timing of convolutions, cuBLAS with a
                  fixed workspace

Other processors, other versions of torch and other numbers of replicas still give other bits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from whorl.nn.cpu import library
from whorl.nn.experts import experts


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Within the context, no measurement decides a bit.

    Every replica and every producer of rollouts enters it before anything is chosen.
    """
    if not enabled:
        yield
        return
    import torch._inductor.config as inductor  # the import takes a second

    # Must be set before the first product on a GPU, or cuBLAS raises. No effect elsewhere.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        experts.forced_library,
        inductor.deterministic,
    )
    if not before[0]:  # forced choices that an outer context has made stay
        library.clear_choices()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.set_num_threads(1)
    experts.forced_library = "mkl"
    inductor.deterministic = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]
        torch.set_num_threads(before[3])
        experts.forced_library, inductor.deterministic = before[4:]
