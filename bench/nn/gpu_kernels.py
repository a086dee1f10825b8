"""The Triton kernels on a GPU, forward and backward, against torch: tensor operations, compiled, and fused attention.

    python bench/nn/gpu_kernels.py [--quick] [--check] [--bytes]

bf16, at the sizes of a 125M-parameter model (16,384 tokens of width 768, 12 heads of 64, vocabulary 50,304). Attention
has three lengths, with one document per row and with packed rows. Contenders alternate in every round; figures are
medians of CUDA events. `moved` is the number of bytes that the kernel must read and write (docs/kernels.md), and the
resulting bandwidth. Bar: every kernel is at least as fast as the best of torch's contenders.

--check compares results without timing. Without a GPU the script prints a note and exits. With TRITON_INTERPRET=1,
--check runs tiny sizes in Triton's interpreter.

--bytes needs neither GPU nor Triton. It counts the bytes that the plain forms read and write, by the operations that
torch dispatches, forward and backward. The unit is bytes per element of the input (of the logits; of q), as in
docs/kernels.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from whorl.nn.attention import Mask, attend
from whorl.nn.gpu import autotune as choice
from whorl.nn.norm import rms_norm_reference
from whorl.nn.rotary import apply_rotary_reference, rotary_tables
from whorl.objectives.next_token import logits_step

Work = Callable[[], tuple[Tensor, ...]]


@dataclass
class Case:
    """One operation at one size: the kernel ("triton") and its peers, each forward and backward; bytes it moves."""

    name: str
    works: dict[str, Work]
    moved: int


def cases(device: str, dtype: torch.dtype, small: bool, quick: bool) -> Iterator[Case]:
    """small: for the interpreter."""
    from whorl.nn.gpu import attention, cross_entropy, rms_norm, rotary

    g = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(like)

    both, compiled = choice.forward_and_backward, functools.partial(torch.compile, dynamic=False)

    def trio(ours: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor) -> dict[str, Work]:
        works = {"triton": both(ours, *inputs), "torch": both(plain, *inputs)}
        return works if small else works | {"compiled": both(compiled(plain), *inputs)}

    tokens, width, heads, d, vocab = (8, 48, 2, 16, 65) if small else (16_384, 768, 12, 64, 50_304)
    n = dtype.itemsize
    x = drawn(tokens, width)
    gain = torch.ones(width, device=device)
    yield Case(
        f"RMSNorm {tokens} x {width}", trio(rms_norm.rms_norm, rms_norm_reference, x, gain), 5 * n * x.numel()
    )
    x, gain = drawn(1, tokens, heads, d), torch.ones(heads, 1, device=device)
    yield Case(
        f"RMSNorm of heads {tokens} x {heads} x {d}",
        trio(rms_norm.rms_norm, rms_norm_reference, x, gain),
        5 * n * x.numel(),
    )
    tables = rotary_tables(torch.arange(tokens, device=device), d, dtype=dtype)
    yield Case(
        f"rotary {tokens} x {heads} x {d}",
        trio(lambda x: rotary.rotary(x, *tables), lambda x: apply_rotary_reference(x, *tables), x),
        4 * n * x.numel(),
    )
    rows = min(tokens, 4096)
    logits, targets = drawn(rows, vocab), torch.randint(0, vocab, (rows,), generator=g, device=device)
    keep = torch.ones(rows, device=device)

    def loss(step: Callable[..., tuple[Tensor, ...]]) -> Work:
        return lambda: step(
            logits.clone(), targets, keep, 1e-4
        )  # the clone, in all of them: it is written over

    steps = {"triton": loss(cross_entropy.cross_entropy_), "torch": loss(logits_step)}
    steps |= {} if small else {"compiled": loss(compiled(logits_step))}
    yield Case(f"cross-entropy {rows} x {vocab}", steps, 5 * n * logits.numel())
    lengths = (20,) if small else (2048,) if quick else (512, 2048, 8192)
    for length in lengths:
        batch = max(1, tokens // length)
        shapes = (heads, heads // 2, heads // 2)
        q, k, v = (drawn(batch, length, h, d).transpose(1, 2) for h in shapes)
        documents = torch.arange(length, device=device).div(max(1, length // 6), rounding_mode="floor")
        documents = documents.expand(batch, -1)
        masks = {
            "causal": Mask(),
            "six documents": Mask(query_segments=documents, key_segments=documents),
            "window": Mask(window=length // 8),
        }
        for name, mask in masks.items():
            works: dict[str, Work] = {
                "triton": both(
                    lambda q, k, v, mask=mask: attention.attention(q, k, v, mask, d**-0.5), q, k, v
                ),
                "torch": both(functools.partial(attend, mask=mask, backend="sdpa"), q, k, v),
            }
            if not small:
                works["flex"] = both(functools.partial(attend, mask=mask, backend="flex"), q, k, v)
            moved = n * (q.numel() * 9 + k.numel() * 8)  # docs/kernels.md
            yield Case(f"attention {batch} x {length}, {name}", works, moved)


class Traffic(TorchDispatchMode):
    """Bytes that the operations inside read and write; views cost nothing, a spread tensor what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        given, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in ((args, kwargs), out))
        kept = {t.untyped_storage().data_ptr() for t in given}
        views = all(t.untyped_storage().data_ptr() in kept for t in made) and not function._schema.is_mutable
        if made and not views:
            self.bytes += sum(
                min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in (*given, *made)
            )
        return out


def count_bytes() -> None:
    """Of the plain forms on a CPU, in bf16."""
    g = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    def plain_loss(logits: Tensor) -> tuple[Tensor, ...]:
        return logits_step(logits, torch.zeros(256, dtype=torch.long), torch.ones(256), 1e-4)

    tables = rotary_tables(torch.arange(512), 64, dtype=torch.bfloat16)
    x, logits, q = drawn(4096, 768), drawn(256, 8192), drawn(1, 2, 2048, 64)
    masks = {
        "causal": Mask(),
        "packed": Mask(query_segments=torch.zeros(1, 2048), key_segments=torch.zeros(1, 2048)),
    }

    def both(function: Callable[..., Tensor], *inputs: Tensor) -> Work:
        """As `choice.both_ways`, with an upstream gradient that is made before the counting begins."""
        leaves = [t.detach().requires_grad_() for t in inputs]
        upstream = torch.ones_like(function(*inputs))

        def work() -> tuple[Tensor, ...]:
            y = function(*leaves)
            return y, *torch.autograd.grad(y, leaves, upstream)

        return work

    works: dict[str, tuple[Tensor, Work]] = {
        "RMSNorm": (x, both(rms_norm_reference, x, torch.ones(768))),
        "rotary": (y := drawn(4, 512, 8, 64), both(lambda y: apply_rotary_reference(y, *tables), y)),
        "cross-entropy": (logits, lambda: plain_loss(logits)),
    }
    for name, mask in masks.items():
        work = both(functools.partial(attend, mask=mask, backend="reference"), q, q, q)
        works[f"attention, reference, {name}, T = 2048"] = q, work
    for name, (like, work) in works.items():
        with Traffic() as traffic:
            work()
        print(f"{name}: {traffic.bytes / like.numel():.1f} bytes an element")


def time_of(work: Work) -> float:
    """Milliseconds."""
    begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begun.record()
    work()
    ended.record()
    ended.synchronize()
    return float(begun.elapsed_time(ended))


def main() -> int:
    quick, check = "--quick" in sys.argv, "--check" in sys.argv
    if "--bytes" in sys.argv:
        count_bytes()
        return 0
    if not choice.triton_installed():
        print("skipped: needs Triton (pip install triton)")
        return 77
    from whorl.nn.gpu.triton_support import INTERPRETED

    interpreted = INTERPRETED and check
    if not torch.cuda.is_available() and not interpreted:
        print("skipped: needs a CUDA device")
        return 77
    device, dtype = ("cpu", torch.float32) if interpreted else ("cuda", torch.bfloat16)
    failed = 0
    for case in cases(device, dtype, small=interpreted, quick=quick):
        wrong = choice.mismatch(case.works["triton"](), case.works["torch"]())
        failed += wrong is not None
        if check or wrong is not None:
            print(f"{case.name}: {wrong or 'agrees'}", flush=True)
            continue
        times: dict[str, list[float]] = {name: [] for name in case.works}
        for turn in range(8 if quick else 33):
            for name, work in case.works.items():
                took = time_of(work)
                if turn > 2:  # before that compilers run and caches fill
                    times[name].append(took)
        report(case, {name: median(values) for name, values in times.items()}, quick)
    return min(1, failed)


def report(case: Case, result: dict[str, float], quick: bool) -> None:
    from bench._run import claim

    peer = min(value for name, value in result.items() if name != "triton")
    rate = f"{case.moved / result['triton'] / 1e6:.0f} GB/s"
    claim(
        f"{case.name}, forward and backward: by Triton at least as fast as the best of torch",
        ours=round(result["triton"], 4), peer=round(peer, 4), unit="ms", ratio=peer / result["triton"], bar=1.0,
        variant=case.name.replace(",", "").replace(" ", "-"), ok=peer >= result["triton"],
        samples=[{name: round(value, 4) for name, value in result.items()} | {"moved": rate}], quick=quick
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
