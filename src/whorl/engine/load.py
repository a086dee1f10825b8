"""Load a model in the dtype in which this machine decodes fastest.

Training multiplies thousands of rows at a time. Decoding multiplies few rows, and is bound by weight bandwidth and call
overhead. A CPU that trains fastest in bf16 may decode twice as fast in fp32 while the weights fit its caches, and no CPU
flag gives the size where this changes. So one step's matrix products are timed in both dtypes, with the model's shapes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from whorl.machine.device_probe import Machine
from whorl.machine.kernel_choice import fastest
from whorl.models import LanguageModel, TransformerConfig, load_model, make_model, read_config
from whorl.nn import Linear
from whorl.nn.compiler import meta_device

# Of fp32 weights; larger models do not fit a cache, and fewer layers give the same answer.
MAX_TIMED_BYTES = 256e6
MAX_TIMED_LAYERS = 100


def load_for_sampling(
    folder: Path, machine: Machine, batch_size: int = 1, masked: bool = False, with_adapter: bool = True
) -> LanguageModel:
    """Load the model of `folder`, ready to decode `batch_size` sequences at a time. Flags: as of `load_model`.

    Raises:
        CheckpointError: as `load_model`.
    """
    dtype = fastest_dtype(read_config(folder), machine, batch_size)
    return load_model(folder, dtype, machine.device, masked=masked, with_adapter=with_adapter).eval()


@torch.inference_mode()
def fastest_dtype(config: TransformerConfig, machine: Machine, batch_size: int = 1) -> torch.dtype:
    """Return the faster compute dtype for decoding `batch_size` sequences of this shape (`machine/kernel_choice.py`)."""
    if machine.device != "cpu" or machine.torch_dtype == torch.float32:
        return machine.torch_dtype
    with meta_device():
        few = config.model_copy(update={"n_layers": min(config.n_layers, MAX_TIMED_LAYERS)})
        blocks = make_model(few).blocks
    # Expert layers are left out: a token uses few of them, one after another.
    layers = [[tuple(m.weight.shape) for m in block.modules() if isinstance(m, Linear)] for block in blocks]
    shapes: list[tuple[int, ...]] = []
    for layer in layers:
        if not shapes or 4 * sum(a * b for a, b in shapes + layer) <= MAX_TIMED_BYTES:
            shapes += layer
    if not shapes:
        return machine.torch_dtype

    def multiply(weights: list[Tensor]) -> None:
        for weight in weights:
            torch.nn.functional.linear(weight.new_zeros(batch_size, weight.shape[1]), weight)

    name = (
        f"sampling_dtype {batch_size} rows, {len(shapes)} products, {sum(a * b for a, b in shapes)} weights"
    )
    dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (machine.torch_dtype, torch.float32)}
    weights = {key: [torch.zeros(shape, dtype=dtype) for shape in shapes] for key, dtype in dtypes.items()}
    return dtypes[fastest(name, {key: partial(multiply, weights[key]) for key in dtypes})]
