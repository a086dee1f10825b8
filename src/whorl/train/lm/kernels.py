"""The kernels of a training step on a CPU, chosen by timing for its shapes, before the step is compiled.

    attention       blocked products in torch, or C++                  nn/attention/causal.py
    mlp             products in torch, or C++                          nn/mlp.py
    linear          weight gradients by torch, or C++                  nn/cpu/linear.py
    cross_entropy   compiled, or C++ in one reading                    nn/cpu/cross_entropy.py
    head            tokens whose logits are held at a time, with torch's or C++'s gradient
                                                                       objectives/next_token.py
    update          the optimizer's passes, in torch or in C++         nn/cpu/update.py
    adamw           one operation after the other, or torch's fused    train/optim/optimizers.py

In bf16 and in fp32; in other types a forced choice is refused. Under torch's deterministic algorithms, and in a job of about
a second, the first of each is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from whorl.machine.kernel_choice import BACKENDS, fastest, forced_choices, refuse_forced
from whorl.models import LanguageModel
from whorl.nn import Linear, mlp
from whorl.nn.attention.causal import choose_path
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.cpu import cross_entropy, library, linear, update
from whorl.nn.gpu.dispatch import logits_step
from whorl.objectives.next_token import default_chunk_tokens, next_token
from whorl.train.job import Job, last_rows
from whorl.train.optim.optimizers import AdamW

MAX_LOGITS_BYTES = 1 << 25  # held at a time
MIN_TIMED_FLOPS = 1e11  # of a job, a second of one core; timing takes several
MAX_ADAMW_NUMBERS = 1 << 22
CHOICES = ("attention", "mlp", "linear", "cross_entropy", "head", "update", "adamw")
CHUNK_FACTORS = (2, 4, 8, 16)  # of the default chunk


@dataclass(frozen=True)
class Kernels:
    """The choices that are not made by shape.

    chunk_tokens: whose logits are held at a time, None for the default. native_update: the optimizer's passes in C++.
    fused_adamw: as `OptimConfig.fused`; None in other types and on a GPU, which leaves it to `AdamW`.
    """

    chunk_tokens: int | None = None
    native_update: bool = False
    fused_adamw: bool | None = None


def choose_kernels(model: LanguageModel, job: Job, always: bool = False) -> Kernels:
    """Choose the kernels of `job`: those of the model by shape, for this process; the others are returned.

    always: also for a short job, whose steps stand for those of a longer one.
    """
    flops = job.steps * job.batch_size * job.seq_len * model.flops_per_token(job.seq_len)
    if flops < MIN_TIMED_FLOPS and not always and forced_choices().keys() <= BACKENDS.keys():
        return torch_kernels()
    rows = job.micro_batch_size or job.batch_size // job.replicas
    at_end = last_rows(job)
    long = (max(1, rows * job.seq_len // at_end.seq_len), at_end.seq_len) if job.long_ratio else None
    return choose_step_kernels(model, rows, job.seq_len, job.optim.fused, long)


def torch_kernels() -> Kernels:
    """Leave all kernels of this process to torch, also shapes that an earlier job of it has chosen."""
    library.clear_choices()
    return Kernels()


def choose_step_kernels(
    model: LanguageModel,
    rows: int,
    length: int,
    fused_adamw: bool | None = None,
    long: tuple[int, int] | None = None,
) -> Kernels:
    """Choose the kernels of micro-batches [rows, length], as `choose_kernels`. fused_adamw: as set, None times it.

    long: rows and length of the micro-batches at the end of a run, whose attention is chosen too. The weights are not
    read: they may be on the device "meta".

    Raises:
        ConfigError: a forced choice that is impossible.
    """
    device, dtype = model.embedding.device.type, model.dtype
    if device not in ("cpu", "meta") or dtype not in (torch.bfloat16, torch.float32):
        kind = str(dtype).removeprefix("torch.")
        allowed = "there are choices in bfloat16 and float32 on a CPU"
        refuse_forced(CHOICES, f"training in {kind} on {device} has none; {allowed}")
        return torch_kernels()
    library.clear_choices()
    if not torch.are_deterministic_algorithms_enabled():
        library.build_sources(dtype)
    layers = (mixer for mixer in model.layer_mixers() if isinstance(mixer, MultiHeadAttention))
    for heads, head_dim in sorted({(mixer.n_heads, mixer.head_dim) for mixer in layers}):
        for shape in filter(None, ((rows, length), long)):
            choose_path(shape[0], heads, shape[1], head_dim, dtype)
    vocabulary, width = model.head_weight.shape
    tokens = rows * length
    linears = [m for m in model.modules() if type(m) is Linear and m.bias is None and m.matmul is None]
    shapes = {(m.weight.shape[1], m.weight.shape[0]) for m in linears}
    plain = (m for m in model.modules() if isinstance(m, mlp.MLP) and m.is_plain_relu2)
    for d, hidden in sorted({(m.up.weight.shape[1], m.up.weight.shape[0]) for m in plain}):
        if mlp.choose_path(tokens, d, hidden, dtype) == "native":
            shapes -= {(d, hidden), (hidden, d)}
    for inner, outer in sorted(shapes):
        linear.choose_weight_gradient((tokens, inner, outer), dtype)
    step = cross_entropy.choose_logits_step(min(default_chunk_tokens(vocabulary), tokens), vocabulary, dtype)
    return Kernels(
        _choose_chunk(tokens, model, step),
        update.choose_update(4 * width, width, dtype),
        fused_adamw if fused_adamw is not None else _choose_fused_adamw(vocabulary * width),
    )


def _choose_fused_adamw(numbers: int) -> bool:
    """Time AdamW over a matrix of this many numbers."""
    numbers = min(numbers, MAX_ADAMW_NUMBERS)
    gradient = {"w": torch.full((numbers,), 1e-3)}

    def run(fused: bool) -> Callable[[], object]:
        optimizer = AdamW([("w", torch.zeros(numbers))], {"w": 1e-3}, fused=fused)
        return lambda: optimizer.step(gradient, 1.0)

    return fastest(f"adamw {numbers}", {"passes": run(False), "fused": run(True)}) == "fused"


def _choose_chunk(tokens: int, model: LanguageModel, step: str) -> int:
    """Time head and loss of all tokens in chunks of several sizes, with torch's weight gradient and that in C++.

    step: the choice of `choose_logits_step`. Returns the tokens of a chunk: the default, untimed, if no larger one is needed
    or allowed, or under deterministic algorithms.
    """
    (vocabulary, width), dtype = model.head_weight.shape, model.dtype
    default = default_chunk_tokens(vocabulary)
    most = MAX_LOGITS_BYTES // dtype.itemsize // vocabulary
    sizes = [default, *(default * n for n in CHUNK_FACTORS if default * n <= most)]
    sizes = [size for n, size in enumerate(sizes) if n == 0 or sizes[n - 1] < tokens]
    hidden = torch.arange(tokens * width).remainder(97).sub(48).div(48).to(dtype).view(tokens, width)
    head = torch.arange(vocabulary * width).remainder(89).sub(44).div(2000).view(vocabulary, width)
    targets, mask = torch.arange(tokens) % vocabulary, torch.ones(tokens, dtype=torch.bool)

    def shape(size: int) -> tuple[int, int, int]:
        return min(size, tokens), width, vocabulary

    def run(size: int, native: bool) -> Callable[[], object]:
        def loss() -> object:
            linear.select(shape(size), dtype, native)
            return next_token(
                hidden, head, targets, mask, select_step=logits_step, chunk_tokens=size,
                weight_gradient=linear.weight_gradient,
            ).total  # fmt: skip

        return loss

    ways = {str(n): run(n, False) for n in sizes}
    ways |= {f"{n} native": run(n, True) for n in sizes if linear.supports(shape(n), dtype)}
    name = f"head {tokens}x{width}x{vocabulary} {library.short_name(dtype)}, {step}"
    size, _, native = fastest(name, ways, flops=6.0 * tokens * width * vocabulary).partition(" ")
    linear.select(shape(int(size)), dtype, bool(native))
    return int(size)
