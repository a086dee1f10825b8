"""The C++ sampler against numpy's: ids, log-probabilities, banned ids, and rows without a valid id."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.compiler import needs_compiler
from tests.support.engine.parity import decoder

from whorl.engine.cpu import NativeStep
from whorl.engine.cpu.sampling import row_sampler
from whorl.engine.sampling.sampler import NoValidTokenError, Sampler, SamplerRow, SamplingParams

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def step() -> NativeStep:
    return NativeStep(decoder(), 4, threads=2)


def samplers(step: NativeStep, size: int, banned: list[int]) -> tuple[Sampler, Sampler]:
    """By numpy, and in C++."""
    plain, native = Sampler(size, banned), Sampler(size, banned)
    native.draw_plain = row_sampler(step, native.is_banned)
    assert native.draw_plain is not None
    return plain, native


@given(
    size=st.integers(2, 700), rows=st.integers(1, 60), seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 3, 60]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 8.0]), n_banned=st.integers(0, 5), rounded=st.booleans(),
    top_k=st.sampled_from([0, 0, 1, 5, 400]), top_p=st.sampled_from([1.0, 1.0, 0.95, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
)  # fmt: skip
def test_rows_equal_numpys(
    step: NativeStep, size: int, rows: int, seed: int, scale: float, temperature: float, n_banned: int, rounded: bool,
    top_k: int, top_p: float, min_p: float,
) -> None:  # fmt: skip
    """`rounded`: many equal logits, of which the first ids are kept."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, size, generator=generator) * scale
    banned = torch.randperm(size, generator=generator)[: min(n_banned, size - 1)].tolist()
    logits[:, torch.randperm(size, generator=generator)[: size // 9]] = -torch.inf
    logits[:, next(i for i in range(size) if i not in banned)] = 1.0
    made = [
        SamplerRow(SamplingParams(temperature=temperature, top_p=1), seed=n, n_drawn=n) for n in range(rows)
    ]
    plain, native = samplers(step, size, banned)
    for a, b in zip(plain(logits, made), native(logits, made), strict=True):
        assert a.id == b.id and b.id not in banned
        assert b.log_prob == pytest.approx(a.log_prob, abs=2e-5)
        assert b.raw_log_prob == pytest.approx(a.raw_log_prob, abs=2e-5)
    own = [native(logits[n : n + 1], made[n : n + 1])[0] for n in range(rows)]
    assert own == native(logits, made)  # a row's bits do not depend on the batch


def test_frequencies(step: NativeStep) -> None:
    """20,000 draws from a row of 300 ids: each frequency within five standard deviations."""
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0)) * 2
    _, native = samplers(step, 300, [4])
    settings_of_row = SamplingParams(temperature=0.8, top_p=1)
    made = [SamplerRow(settings_of_row, seed=9, n_drawn=n) for n in range(20_000)]
    counts = np.bincount(
        [t.id for t in native(logits.expand(len(made), -1).contiguous(), made)], minlength=300
    )
    p = native.distribution(logits[None], made[:1])[0].double().numpy()
    assert counts[4] == 0
    assert (np.abs(counts - p * len(made)) <= 5 * np.sqrt(len(made) * p * (1 - p)) + 1e-9).all()


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_ends_of_the_unit_interval(step: NativeStep, u: float) -> None:
    """u at both ends draws the first and the last id that may be drawn."""
    banned = np.zeros(260, np.bool_)
    banned[[0, 259]] = True
    draw = row_sampler(step, banned)
    assert draw is not None
    ids, log_probs, _ = draw(
        np.zeros((1, 260), np.float32), np.array([u]), [SamplingParams(temperature=1, top_p=1)]
    )
    assert ids[0] == {0.0: 1, 0.5: 130, 1 - 2.0**-53: 258}[u]
    assert log_probs[0] == pytest.approx(-np.log(258))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_valid_id_are_named(step: NativeStep, bad: float) -> None:
    _, native = samplers(step, 40, [1])
    logits = torch.zeros(3, 40)
    logits[1, 5] = bad
    made = [SamplerRow(SamplingParams(temperature=t, top_p=1)) for t in (0.0, 1.0, 1.0)]
    with pytest.raises(NoValidTokenError, match="row 1 of") as caught:
        native(logits, made)
    assert caught.value.rows == (1,)
    assert [token is None for token in native.sample_or_none(logits, made)] == [False, True, False]


def test_rows_with_other_options_are_numpys(step: NativeStep) -> None:
    """A batch of both kinds."""
    plain, native = samplers(step, 50, [])
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(1))
    made = [
        SamplerRow(SamplingParams(temperature=1, presence_penalty=p), seed=n)
        for n, p in enumerate((0, 1, 0, 2))
    ]
    a, b = plain(logits, made), native(logits, made)
    assert [t.id for t in a] == [t.id for t in b]
    assert [a[1], a[3]] == [b[1], b[3]]


def test_dead_rows_of_both_kinds_keep_their_numbers(step: NativeStep) -> None:
    _, native = samplers(step, 40, [])
    logits = torch.zeros(5, 40)
    logits[3, 5] = logits[4, 5] = float("nan")
    made = [SamplerRow(SamplingParams(presence_penalty=p)) for p in (0.0, 0.5, 0.0, 0.5, 0.0)]
    assert [t is None for t in native.sample_or_none(logits, made)] == [False, False, False, True, True]
