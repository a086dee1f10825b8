"""The choices that a training step and the engine make by timing, for one shape and without a run."""

from __future__ import annotations

from collections import Counter

import torch

from whorl.engine.cache.layer_cache import page_windows
from whorl.engine.native import unsupported_reason
from whorl.engine.native.candidates import WEIGHT_DTYPES
from whorl.engine.native.runner import make_runner
from whorl.machine.kernel_choice import ChoiceRequest, listed_requests
from whorl.models import TransformerConfig, make_model
from whorl.nn import mlp
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.compiler import meta_device
from whorl.nn.native.orthogonalize import choose_orthogonalize
from whorl.train.lm.kernels import choose_step_kernels
from whorl.train.optim.optimizers import POLAR_EXPRESS, orthogonalize
from whorl.train.profiling.products import muon_batches

PAGE_SIZE, PAGES, ROWS = 16, 8, 8  # of the engine's timed steps


def training_choices(
    model: TransformerConfig, rows: int, length: int, muon_every: int, dtype: torch.dtype
) -> list[tuple[ChoiceRequest, int]]:
    """Return the choices of one replica's step on `rows` of `length` tokens, with the number of calls in a step.

    dtype: bf16 or fp32.
    0 calls: part of another choice (the loss, of the head), or no matrix product (the optimizer's passes).
    """
    with meta_device():
        network = make_model(model, dtype=dtype)
    with listed_requests() as requests:
        choose_step_kernels(network, rows, length)
        for batch in muon_batches(model, muon_every):
            choose_orthogonalize(batch, POLAR_EXPRESS, dtype, orthogonalize)
    layers = Counter(
        f"attention {rows}x{mixer.n_heads}x{length}x{mixer.head_dim}"
        for mixer in network.layer_mixers()
        if isinstance(mixer, MultiHeadAttention)
    )
    layers.update(
        f"mlp {rows * length}x{part.up.weight.shape[1]}x{part.up.weight.shape[0]}"
        for part in network.modules()
        if isinstance(part, mlp.MLP) and part.is_plain_relu2
    )
    once = ("head", "orthogonalize")
    return [
        (request, layers[" ".join(request.name.split()[:2])] or int(request.name.startswith(once)))
        for request in requests
    ]


def engine_choices(model: TransformerConfig) -> list[ChoiceRequest]:
    """Return the engine's choices between torch and the native step, for whole steps with each type of weights."""
    with listed_requests() as requests:
        for kind in WEIGHT_DTYPES:
            dtype = torch.float32 if kind == "float32" else torch.bfloat16
            network = make_model(model, torch.Generator().manual_seed(0), dtype).eval().requires_grad_(False)
            if unsupported_reason(network) is not None:
                break
            windows = page_windows(mixer.cache_spec() for mixer in network.layer_mixers()) or [None]
            make_runner(
                network, dict.fromkeys(windows, PAGES), PAGE_SIZE, ROWS, PAGES * PAGE_SIZE,
                weight_dtype="int8" if kind == "int8" else None,
            )  # fmt: skip
    return requests
