"""Determinism: the same bits twice, at the price of what was faster.

Training has no clock in it, and every sum is taken in a fixed order, so a run can be repeated on one machine as it is. What
still differs between two runs of one recipe is what was *measured* for them: the plan's choices (how many steps, compiled or
not, fp32 or bf16, how many replicas and threads), and the library that multiplies small matrices (`nn/experts`). With
`--deterministic` none of these is measured:

    compiled      not, unless the recipe says so (then without the compiler's own timing of kernels)
    type          float32 on a CPU, bfloat16 on a GPU, unless WHORL_DTYPE says otherwise
    replicas      as the recipe says, else one for each usable core; on them the last bits depend
    threads       one in each replica: a sum split over two threads is another sum
    products      MKL's, never oneDNN's
    steps         from the recipe or a budget of FLOPs: a budget of seconds is refused
    torch         only algorithms that give the same bits each time (an operation that has none raises), no timing of
                  convolutions, cuBLAS with a fixed workspace

What it cannot give: the same bits on another kind of processor or another version of torch, nor on another number of
replicas, whose sums are other sums.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from whorl.nn.experts import experts


@contextmanager
def deterministic(enabled: bool = True) -> Iterator[None]:
    """Within it, nothing that torch or `nn/experts` would choose by measuring decides a bit. In every replica."""
    if not enabled:
        yield
        return
    import torch._inductor.config as inductor  # takes a second

    # Before the first product on a GPU, or cuBLAS refuses; of no effect elsewhere.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
        torch.get_num_threads(),
        experts.forced_library,
        inductor.deterministic,
    )
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
