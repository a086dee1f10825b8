"""The C++ attention, in each variant of its products, against the definition in fp64."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from tests.support.nn.checks import gen
from tests.support.nn.cpu import VARIANTS, build_variant, dtype_of

from whorl.errors import ConfigError
from whorl.machine.kernel_choice import FORCE
from whorl.nn.attention import causal
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.cpu import attention as native
from whorl.nn.cpu.library import native_library
from whorl.nn.rotary import Rotary


@pytest.fixture(params=VARIANTS)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    found = build_variant("causal_attention", request.param)
    monkeypatch.setattr(native, "library", lambda _dtype: found)
    monkeypatch.setattr(native, "_chosen", {})
    return dtype_of(request.param)


def relative_error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "documents"),
    [
        ((2, 3, 64, 64), []),
        ((1, 2, 77, 32), []),
        ((1, 1, 170, 96), []),
        ((1, 2, 5, 64), []),
        ((2, 1, 200, 64), [30, 150, 20]),
        ((2, 1, 64, 32), [32]),  # at a border of blocks
        ((2, 2, 333, 32), [1, 1, 40, 95, 160, 3, 30]),  # longer than a group of blocks, and a padded end
    ],
    ids=str,
)
def test_native_attention_matches_definition(
    dtype: torch.dtype, shape: tuple[int, int, int, int], documents: list[int], threads: int
) -> None:
    batch, heads, length, d = shape
    numbers = torch.randn(4, batch, length, heads, d, generator=gen(1)).to(dtype).transpose(2, 3)
    q, k, v = (t.detach().requires_grad_() for t in (numbers[0] * d**-0.5, *numbers[1:3]))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    segments = None
    if documents:  # the second row has them in the opposite order
        ends = [torch.tensor(order).cumsum(0) for order in (documents, documents[::-1])]
        segments = torch.stack([torch.searchsorted(end, torch.arange(length), right=True) for end in ends])
        allowed = (allowed & (segments[:, :, None] == segments[:, None]))[:, None]
    scores = (exact[0] @ exact[1].mT).masked_fill(~allowed, float("-inf"))
    want = scores.softmax(-1) @ exact[2]
    want.backward(numbers[3].double())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out = native.causal_attention(q, k, v, segments)
        out.backward(numbers[3])
    finally:
        torch.set_num_threads(before)
    errors = (0.004, 0.012) if dtype == torch.bfloat16 else (2e-6, 2e-6)
    assert relative_error(out.detach(), want.detach()) < errors[0]
    for tensor, expected in zip((q, k, v), exact, strict=True):
        assert tensor.grad is not None and expected.grad is not None
        assert relative_error(tensor.grad, expected.grad) < errors[1]


def test_attention_takes_the_selected_path(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = (1, 2, 40, 32)
    q = torch.randn(shape, generator=gen(2)).to(dtype).requires_grad_()
    calls: list[torch.Tensor | None] = []
    monkeypatch.setattr(native, "causal_attention", lambda q, k, v, s: calls.append(s) or q)
    packed = torch.zeros(1, 40, dtype=torch.long)
    for forced, segments, expected in (
        ("native", None, [None]),
        ("native", packed, [packed]),
        ("blocked", None, []),
    ):
        native.select(shape, dtype, forced == "native")
        calls.clear()
        causal.causal_attention(q, q, q, segments)
        assert calls == expected


def test_path_is_never_native_in_deterministic_mode(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "attention=native")
    assert causal.choose_path(1, 1, 33, 32, dtype) == "native"
    monkeypatch.delenv(FORCE)
    torch.use_deterministic_algorithms(True)
    try:
        assert causal.choose_path(1, 1, 33, 32, dtype) == "blocked"
    finally:
        torch.use_deterministic_algorithms(False)
    q = torch.zeros(1, 1, 33, 32, dtype=dtype)
    assert not native.is_chosen(q, q, q)


def test_native_attention_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_library.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="no-such-compiler"):
            assert not native.supports(64, torch.float32)
        monkeypatch.setenv(FORCE, "attention=native")
        with pytest.raises(ConfigError, match="native"):
            causal.choose_path(1, 1, 34, 32, torch.float32)
    finally:
        native_library.cache_clear()


@pytest.mark.parametrize(
    ("batch", "length", "d", "documents", "threads"),
    [
        (2, 64, 64, [], 1),
        (2, 200, 64, [30, 150, 20], 1),
        (1, 77, 32, [], 2),
        (2, 333, 32, [1, 1, 40, 95, 160, 3, 33], 2),
        (1, 40, 96, [32, 8], 1),
    ],
)
def test_rotary_attention_matches_layer(
    dtype: torch.dtype, batch: int, length: int, d: int, documents: list[int], threads: int
) -> None:
    def layer(kind: torch.dtype) -> tuple[MultiHeadAttention, tuple[torch.Tensor, torch.Tensor]]:
        rotary = Rotary(d, 10_000.0, kind)
        made = MultiHeadAttention(
            2 * d, 2, head_dim=d, rotary=rotary, qk_norm=1e-6, scale="learned", smear=True, projections="fused",
            backend="blocked", generator=gen(1),
        )  # fmt: skip
        with torch.no_grad():
            for parameter in made.parameters():  # none of them at a special value
                parameter += torch.randn(parameter.shape, generator=gen(2)) * 0.3
            made.temperature *= 0.2  # with large scores, the error of bf16 hides others
        return made, rotary.tables_between(0, length, torch.device("cpu"))

    x = torch.randn(batch, length, 2 * d, generator=gen(3)).to(dtype)
    d_y = torch.randn(x.shape, generator=gen(4))
    segments = None
    if documents:
        ends = [torch.tensor(order).cumsum(0) for order in (documents, documents[::-1])[:batch]]
        segments = torch.stack([torch.searchsorted(end, torch.arange(length), right=True) for end in ends])
    found = {}
    threads_before = torch.get_num_threads()
    exact = torch.float32 if dtype == torch.bfloat16 else torch.float64
    for way, kind in (("exact", exact), ("torch", dtype), ("native", dtype)):
        attention, tables = layer(kind)
        inputs = x.detach().to(kind).requires_grad_()
        native.select((batch, 2, length, d), dtype, way != "torch")
        torch.set_num_threads(threads)
        try:
            with mock.patch.object(native, "rotary_forward", wraps=native.rotary_forward) as kernel:
                y = attention(inputs, tables, segments)
            y.backward(d_y.to(kind))
            assert kernel.called == (way == "native")
        finally:
            torch.set_num_threads(threads_before)
            native._chosen.clear()
        found[way] = {"y": y, "x": inputs.grad, **{n: p.grad for n, p in attention.named_parameters()}}
    for name, want in found["exact"].items():
        assert want is not None
        errors = {
            way: relative_error(found[way][name].detach(), want.detach().double())
            for way in ("torch", "native")
        }
        margin = 0.005 if dtype == torch.bfloat16 else 1e-5
        assert errors["native"] < 1.5 * errors["torch"] + margin, name
