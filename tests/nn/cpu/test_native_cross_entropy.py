"""The C++ cross-entropy against the definition."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import gen

from whorl.machine.kernel_choice import FORCE
from whorl.nn.cpu import cross_entropy
from whorl.nn.cpu.library import native_library
from whorl.nn.gpu import dispatch
from whorl.objectives.next_token import logits_step, next_token, next_token_reference

pytestmark = pytest.mark.skipif(
    native_library("cross_entropy") is None, reason="there is no C++ compiler here"
)


@pytest.fixture(params=[torch.bfloat16, torch.float32], autouse=True)
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    kind: torch.dtype = request.param
    monkeypatch.setattr(cross_entropy, "_chosen", {(kind, 97): True})
    return kind


@pytest.mark.parametrize(("threads", "rows", "z_loss"), [(1, 7, 1e-3), (2, 7, 0.0), (2, 1, 1e-3)])
def test_native_logits_step_matches_torch(dtype: torch.dtype, threads: int, rows: int, z_loss: float) -> None:
    logits = (3 * torch.randn(rows, 97, generator=gen(0))).to(dtype)
    logits[0, 5] = 90.0  # the others underflow
    targets, keep = torch.arange(rows) * 11, (torch.arange(rows) != 2).float()
    want = logits_step(logits.float().clone(), targets, keep, z_loss)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        total, nll, gradient = cross_entropy.logits_step(logits, targets, keep, z_loss, None)
    finally:
        torch.set_num_threads(before)
    assert gradient is logits
    torch.testing.assert_close(total, want[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(nll, want[1], rtol=1e-5, atol=0)
    torch.testing.assert_close(
        gradient.float(), want[2], rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_nan_logit_gives_nan_loss(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 97, dtype=dtype)
    logits[1, 3] = torch.nan
    total, _, _ = cross_entropy.logits_step(logits, torch.zeros(3).long(), torch.ones(3), 0.0, None)
    assert total.isnan()


@pytest.mark.parametrize("chunk", [None, 4, 64])
def test_native_loss_matches_reference_in_any_chunk(dtype: torch.dtype, chunk: int | None) -> None:
    hidden = torch.randn(30, 16, generator=gen(1)).to(dtype).requires_grad_()
    head = torch.randn(97, 16, generator=gen(2)).mul(0.3).requires_grad_()
    targets, mask = torch.arange(30) * 3, torch.arange(30) % 5 > 0
    loss = next_token(hidden, head, targets, mask, 1e-3, select_step=dispatch.logits_step, chunk_tokens=chunk)
    found = (loss.total, *torch.autograd.grad(loss.total, (hidden, head)))
    plain = next_token_reference(hidden, head.to(dtype).float(), targets, mask, 1e-3)
    wanted = (plain.total, *torch.autograd.grad(plain.total, (hidden, head)))
    for value, expected in zip(found, wanted, strict=True):
        difference = value.detach().float() - expected.detach().float()
        assert float(difference.norm() / expected.detach().float().norm()) < (
            0.01 if dtype == torch.bfloat16 else 1e-5
        )


def test_choice_is_never_native_in_deterministic_mode(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FORCE, "cross_entropy=native")
    assert cross_entropy.choose_logits_step(4, 61, dtype) == "native"
    hidden = torch.zeros(4, 8, dtype=dtype)
    assert cross_entropy.is_chosen(hidden, 61, None) and not cross_entropy.is_chosen(hidden, 61, 30.0)
    monkeypatch.delenv(FORCE)
    torch.use_deterministic_algorithms(True)
    try:
        assert cross_entropy.choose_logits_step(4, 61, dtype) == "compiled"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not cross_entropy.is_chosen(hidden, 61, None)
