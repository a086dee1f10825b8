"""Softmax, RMSNorm, cross-entropy and rotary positions in Triton's interpreter, with gradients (see `test_kernels.py`)."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.nn.checks import gen, randn
from torch import Tensor
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.gpu import autotune as choice
from whorl.nn.gpu import dispatch
from whorl.nn.gpu import rms_norm as norms
from whorl.nn.gpu import rotary as turns
from whorl.nn.gpu.cross_entropy import cross_entropy_
from whorl.nn.norm import rms_norm_reference
from whorl.nn.rotary import apply_rotary_reference, rotary_tables
from whorl.objectives.next_token import logits_step, next_token, next_token_reference

ATOL = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def assert_agree(ours: Any, theirs: Any, *inputs: Tensor, atol: float = 2e-6) -> None:
    """Compare values, and gradients of all inputs."""
    found = []
    for function in (ours, theirs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        y = function(*leaves)
        upstream = randn(*y.shape, seed=9).to(y.dtype)
        found.append([y, *torch.autograd.grad(y, leaves, upstream)])
    assert_close(*found, atol=atol, rtol=atol * 10)


GAINS: dict[str, tuple[int, ...] | None] = {"none": None, "per feature": (24,), "per head": (3, 1)}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("none", torch.bfloat16),
        ("per feature", torch.float32),
        ("per head", torch.float32),
        ("per head", torch.bfloat16),
    ],
)
def test_rms_norm_kernel_matches_reference(kind: str, dtype: torch.dtype) -> None:
    x = randn(2, 5, 3, 24).to(dtype)
    shape = GAINS[kind]
    atol = max(ATOL[dtype], 2e-5)
    if shape is None:
        assert_agree(norms.rms_norm, rms_norm_reference, x, atol=atol)
        return
    ours, theirs = partial(norms.rms_norm, eps=1e-3, programs=2), partial(rms_norm_reference, eps=1e-3)
    assert_agree(ours, theirs, x, randn(*shape, seed=1), atol=atol)


@given(
    rows=st.integers(1, 12), width=st.integers(1, 300), programs=st.integers(1, 4), seed=st.integers(0, 99)
)
@settings(max_examples=8)
def test_rms_norm_kernel_matches_for_any_size(rows: int, width: int, programs: int, seed: int) -> None:
    x, gain = randn(rows, width, seed=seed), randn(width, seed=seed + 1)
    ours, theirs = partial(norms.rms_norm, eps=1e-5, programs=programs), partial(rms_norm_reference, eps=1e-5)
    assert_agree(ours, theirs, x, gain, atol=3e-5)
    assert_close(norms.rms_norm(x * 7, gain, 0.0), norms.rms_norm(x, gain, 0.0), atol=1e-4, rtol=1e-4)
    leaf = x.requires_grad_()  # invariance to scale makes the gradient orthogonal to x
    (d_x,) = torch.autograd.grad(norms.rms_norm(leaf, gain, 0.0).sum(), leaf)
    assert float((d_x * x).sum(-1).detach().abs().max()) < 1e-3 * width


def test_rms_norm_supports_gains_and_widths() -> None:
    x = torch.zeros(2, 3, 8)
    assert all(norms.supports(x, gain) for gain in (None, torch.ones(8), torch.ones(3, 1)))
    assert not norms.supports(x, torch.ones(2, 1, 8)) and not norms.supports(x[:0], None)
    assert not norms.supports(torch.zeros(1, norms.MAX_WIDTH + 1), None)


def select_kernel_step(*_: Any) -> Any:
    return lambda *args: cross_entropy_(*args, max_block=32)


@pytest.mark.parametrize(
    ("z_loss", "softcap", "dtype"),
    [
        (0.0, None, torch.float32),
        (1e-2, None, torch.bfloat16),
        (1e-2, 1.5, torch.float32),
        (0.0, 30.0, torch.bfloat16),
    ],
)
def test_cross_entropy_matches_next_token(z_loss: float, softcap: float | None, dtype: torch.dtype) -> None:
    hidden = randn(12, 24).to(dtype).requires_grad_()
    head = randn(101, 24, seed=1, grad=True)
    targets, mask = torch.randint(0, 101, (12,), generator=gen(2)), torch.rand(12, generator=gen(3)) > 0.3
    found = []
    triton = partial(next_token, select_step=select_kernel_step)
    for f in (triton, next_token, next_token_reference):
        loss = f(hidden, head, targets, mask, z_loss, softcap)
        gradients = torch.autograd.grad(loss.total * 0.5, (hidden, head))
        found.append([loss.total, loss.metrics["nll"], *gradients])
    ours, plain, reference = found
    exact = dtype == torch.float32
    assert_close(ours, plain, atol=1e-5 if exact else 2e-2, rtol=1e-4 if exact else 2e-2)
    if exact:
        assert_close(ours, reference, atol=1e-5, rtol=1e-4)


@given(n=st.integers(1, 6), vocab=st.integers(1, 80), seed=st.integers(0, 99))
@settings(max_examples=8)
def test_cross_entropy_gradient_rows_sum_to_0(n: int, vocab: int, seed: int) -> None:
    logits = randn(n, vocab, seed=seed) * 5
    targets = torch.randint(0, vocab, (n,), generator=gen(seed))
    keep = torch.ones(n)
    keep[0] = 0.0
    logits[0, 0] = float("nan")
    total, nll, d = cross_entropy_(logits, targets, keep, max_block=16)
    assert d is logits and float(total) == float(nll) >= 0.0
    assert not d[0].any()
    assert_close(d.sum(-1), torch.zeros(n), atol=1e-5, rtol=0)


def test_cross_entropy_of_strided_chunk_and_bad_target() -> None:
    whole = randn(4, 50)
    before, targets, keep = whole.clone(), torch.tensor([0, 39, 7, 7]), torch.ones(4)
    total, _, d = cross_entropy_(whole[:, :40], targets, keep, max_block=16)
    want_total, _, want = logits_step(before[:, :40], targets, keep)
    assert_close(total, want_total)
    assert_close(d, want, atol=1e-6, rtol=1e-4)
    assert torch.equal(whole[:, 40:], before[:, 40:])
    assert cross_entropy_(before, torch.tensor([0, 50, 1, 1]), keep)[0].isnan()
    assert cross_entropy_(before[:0], targets[:0], keep[:0])[0] == 0
    with pytest.raises(ConfigError, match="contiguous rows"):
        cross_entropy_(before.t(), targets, keep)


@pytest.mark.parametrize(
    ("layout", "dim", "positions_per_row"),
    [("half", 16, False), ("half", 12, True), ("interleaved", 16, True), ("interleaved", 12, False)],
)
def test_rotary_kernel_matches_reference(layout: Any, dim: int, positions_per_row: bool) -> None:
    places = torch.randint(0, 500, (2, 5), generator=gen(4)) if positions_per_row else torch.arange(5)
    cos, sin = rotary_tables(places, 16, layout=layout, rotary_dim=dim)
    x = randn(2, 5, 3, 16)
    assert turns.supports(x, cos, sin)
    tables = {"cos": cos, "sin": sin, "layout": layout}
    ours, theirs = (partial(f, **tables) for f in (turns.rotary, apply_rotary_reference))
    assert_agree(ours, theirs, x)
    # A slice of a wider projection has non-contiguous rows. A rotation keeps lengths.
    wide = randn(2, 5, 7, 16, seed=1)[:, :, 2:5]
    y = ours(wide)
    assert_close(y, theirs(wide), atol=2e-6, rtol=1e-5)
    assert_close(y.norm(dim=-1), wide.norm(dim=-1))


def test_rotary_kernel_in_bf16_and_supported_shapes() -> None:
    cos, sin = rotary_tables(torch.arange(9), 16, dtype=torch.bfloat16)
    x = randn(2, 9, 3, 16).bfloat16()
    ours, theirs = (partial(f, cos=cos, sin=sin) for f in (turns.rotary, apply_rotary_reference))
    assert_agree(ours, theirs, x, atol=2e-2)
    assert not turns.supports(x[0], cos, sin) and not turns.supports(x[:, :8], cos, sin)


def test_dispatch_measures_and_runs_the_faster_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, with fake times: both versions run and agree, and the selected one returns the result."""
    measured = []

    def use_kernel(kind: Any, x: Any, kernel: Any, plain: Any) -> bool:
        hash(kind)
        measured.append(kind[0])
        return choice.is_correct_and_faster(str(kind), kernel, plain, lambda work: 2.0 - (work is kernel))

    def never(*_: Any) -> Tensor:
        raise AssertionError("the reference was called")

    monkeypatch.setattr(dispatch, "use_kernel", use_kernel)
    monkeypatch.setattr(choice, "ROUNDS", 1)
    x, gain = randn(1, 20, 4, 16), randn(4, 1, seed=1)
    calls = []

    def once(reference: Any) -> Any:
        """Record the calls: one in the comparison, none after it."""

        def plain(*args: Any) -> Tensor:
            calls.append(reference)
            return reference(*args)

        return plain

    y = dispatch.rms_norm(x, gain, 1e-6, once(rms_norm_reference))
    assert_close(y, rms_norm_reference(x, gain))
    cos, sin = rotary_tables(torch.arange(20), 16)
    y = dispatch.rotary(x, cos, sin, "half", once(apply_rotary_reference))
    assert_close(y, apply_rotary_reference(x, cos, sin))
    q = x.transpose(1, 2)
    y = dispatch.attention(q, q, q, Mask(), 0.25, once(lambda q, k, v: attend(q, k, v, Mask())))
    assert_close(y, attend(q, q, q, Mask()))
    assert len(calls) == 3 and measured == ["rms_norm", "rotary", "attention"]
    on_gpu = SimpleNamespace(is_cuda=True, shape=(12, 8), device="cpu", dtype=torch.float32)
    for cap in (None, 5.0):
        assert dispatch.logits_step(on_gpu, torch.zeros(77, 8), cap, logits_step) is cross_entropy_
    assert dispatch.logits_step(torch.zeros(3, 8), torch.zeros(77, 8), None, never) is never  # on a CPU
    unsupported = dispatch.rms_norm(x[:0], None, 1e-6, rms_norm_reference)  # not measured
    assert unsupported.shape == x[:0].shape
    assert measured[3:] == ["cross_entropy"] * 2
