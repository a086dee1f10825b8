"""The sampler: the reference against plain Python, the fast path against the reference, and batch invariance."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from whorl.engine import Sampler, SamplerRow, SamplingParams, distribution
from whorl.engine.sampling.penalties import TokenCounts
from whorl.engine.sampling.sampler import NoValidTokenError, uniforms
from whorl.errors import ConfigError

PENALTIES: dict[str, Any] = {"presence_penalty": 1, "repetition_penalty": 1.1, "logit_bias": {3: 5}}
KINDS = [
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, top_p=1),
    SamplingParams(temperature=1.3, top_p=1, min_p=0.02),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1, top_p=1, top_k=40),
    SamplingParams(temperature=0.9, top_p=0.8, top_k=700, min_p=0.001),
    SamplingParams(temperature=1, top_p=0.99999, **PENALTIES),
]


def by_hand(logits: list[float], row: SamplerRow, banned: tuple[int, ...] = ()) -> list[float]:
    """The distribution of one row, id by id."""
    s, z = row.sampling, dict(enumerate(logits))
    z = {i: x for i, x in z.items() if i not in banned and (row.allowed_mask is None or row.allowed_mask[i])}
    for i, bias in s.logit_bias.items():
        if i in z:
            z[i] += bias
    counts_of = Counter(row.output)
    for i in z:
        if i in counts_of or i in row.prompt:
            z[i] = z[i] / s.repetition_penalty if z[i] > 0 else z[i] * s.repetition_penalty
        z[i] -= s.frequency_penalty * counts_of[i] + s.presence_penalty * (i in counts_of)
    order = sorted(z, key=lambda i: (-z[i], i))
    if s.temperature == 0:
        return [float(i == order[0]) for i in range(len(logits))]
    weight = {i: math.exp((z[i] - z[order[0]]) / s.temperature) for i in order}
    if s.top_k:
        order = order[: s.top_k]
    total, before, kept = sum(weight[i] for i in order), 0.0, []
    for i in order:
        if before < s.top_p * total or s.top_p == 1:
            kept.append(i)
        before += weight[i]
    kept = [i for i in kept if weight[i] >= s.min_p]
    total = sum(weight[i] for i in kept)
    return [weight[i] / total if i in kept else 0.0 for i in range(len(logits))]


# Quarters: equal logits are common, and sums of weights are never close to a border by rounding alone.
NUMBERS = st.integers(-12, 12).map(lambda n: n / 4)
SETTINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0, 0.5, 0.7, 1, 3]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.1, 0.501, 0.7, 0.93, 0.999, 1]),
    min_p=st.sampled_from([0, 0, 0.01, 0.21, 1]),
    repetition_penalty=st.sampled_from([1, 1, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0, 0, 0.4, -1.5]),
    frequency_penalty=st.sampled_from([0, 0, 0.3, -0.7]),
    logit_bias=st.dictionaries(st.integers(0, 6), NUMBERS, max_size=2),
)
IDS = st.lists(st.integers(0, 6), max_size=6)
Batch = tuple[torch.Tensor, list[SamplerRow], tuple[int, ...]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Up to five rows over 7 to 300 ids, some banned and some masked, in either form of mask."""
    size = draw(st.sampled_from([7, 7, 40, 128, 300]))
    count = draw(st.integers(1, 5))
    banned = tuple(draw(st.sets(st.integers(0, 5), max_size=3)))
    rows, logits = [], []
    for number in range(count):
        first = draw(st.lists(NUMBERS, min_size=7, max_size=7))
        logits.append(first + [-3.0 - i / 8 for i in range(size - 7)])
        allowed: Any = None
        if draw(st.booleans()):  # id 6 is never banned: one id remains
            allowed = np.array([True] * size)
            allowed[draw(st.lists(st.integers(0, 5), max_size=4))] = False
        sampling, seed, prompt, output = draw(SETTINGS), draw(st.integers()), draw(IDS), draw(IDS)
        rows.append(SamplerRow(sampling, seed, number, prompt, output, allowed, draw(st.integers(0, 3))))
    return torch.tensor(logits), rows, banned


@given(batch=batches())
def test_distribution_matches_plain_python(batch: Batch) -> None:
    logits, rows, banned = batch
    found = distribution(logits, rows, banned)
    for number, row in enumerate(rows):
        want = by_hand(logits[number].tolist(), row, banned)
        assert found[number].tolist() == pytest.approx(want, abs=2e-6)


def packed(row: SamplerRow) -> SamplerRow:
    """The same row with a packed mask."""
    if row.allowed_mask is None:
        return row
    bits = np.packbits(np.pad(row.allowed_mask, (0, -len(row.allowed_mask) % 32)), bitorder="little")
    return dataclasses.replace(row, allowed_mask=bits.view(np.int32))


@given(batch=batches(), n_sorted=st.sampled_from([1, 3, 512]), order=st.randoms(use_true_random=False))
def test_sampler_matches_reference_in_any_batch(batch: Batch, n_sorted: int, order: Any) -> None:
    logits, rows, banned = batch
    sampler = Sampler(logits.shape[1], banned)
    before = logits.clone()
    sampler._cpu_sampler.partial_sort_size = n_sorted
    want, fast = distribution(logits, rows, banned), sampler.distribution(logits, rows)
    assert torch.equal(want > 0, fast > 0) and torch.allclose(want, fast, atol=1e-6)
    tokens, raw = sampler(logits, rows), logits.log_softmax(-1)
    assert torch.equal(logits, before)
    slow = sampler._sample_reference(logits, rows)
    for number, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        share = float(want[number, token.id])
        assert share > 0 and token.log_prob == pytest.approx(math.log(share), abs=1e-5)
        assert token.raw_log_prob == pytest.approx(float(raw[number, token.id]), abs=1e-5)
        assert token.id == slow[0][number] and slow[1][number] == pytest.approx(token.log_prob, abs=1e-5)
        ranked = [i for i in raw[number].argsort(descending=True, stable=True).tolist() if i not in banned]
        best = ranked[: row.top_log_probs]
        assert [i for i, _ in token.alternatives] == best
        assert [p for _, p in token.alternatives] == pytest.approx(raw[number, best].tolist(), abs=1e-5)
    # Alone, and among any of the others in any order: bit for bit
    some = order.sample(range(len(rows)), order.randint(1, len(rows)))
    again = sampler(logits[some], [packed(rows[n]) for n in some])
    assert again == [tokens[n] for n in some]


@pytest.mark.parametrize("size", [333, 8_192, 50_257])
def test_large_rows_are_invariant_to_batch_and_threads(size: int) -> None:
    g = torch.Generator().manual_seed(size)
    logits = 2.5 * torch.randn(2 * len(KINDS), size, generator=g)
    texts = {"prompt": [1, 2, 3], "output": [5, 6, 5]}
    rows = [SamplerRow(kind, n, n, **texts, top_log_probs=3 * (n % 2)) for n, kind in enumerate(KINDS * 2)]
    banned = (0, 1, size - 1)
    sampler = Sampler(size, banned)
    together = sampler(logits, rows)
    want, fast = distribution(logits, rows, banned), sampler.distribution(logits, rows)
    # At the border of top-p.
    assert torch.allclose(want, fast, atol=1e-6) and ((want > 0) != (fast > 0)).sum() <= 2
    for number, row in enumerate(rows):
        assert Sampler(size, banned)(logits[number : number + 1], [row]) == [together[number]]
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert sampler(logits.flip(0), rows[::-1]) == together[::-1]
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS[1:6])
def test_samples_follow_distribution(kind: SamplingParams) -> None:
    logits, n = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0, 0.5]]), 20_000
    rows = [SamplerRow(kind, seed=7, n_drawn=k) for k in range(n)]
    tokens = Sampler(6)(logits.expand(n, -1).contiguous(), rows)
    want = n * distribution(logits, rows[:1])[0].double()
    counts = torch.bincount(torch.tensor([t.id for t in tokens]), minlength=6)
    assert counts[want == 0].sum() == 0
    assert (((counts - want) ** 2)[want > 0] / want[want > 0]).sum() < 25


def test_uniforms_are_uniform_and_independent() -> None:
    seeds, counters = range(-200, 200), range(500)
    grid = np.array([uniforms([s] * 500, counters) for s in seeds])  # [400, 500]
    assert grid.min() >= 0 and grid.max() < 1 and len(np.unique(grid)) == grid.size
    counts = np.histogram(grid, 100, (0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 160  # 99 degrees of freedom
    centred = grid - 0.5
    other = np.array([uniforms([s] * 500, counters, stream=1) for s in seeds]) - 0.5
    # Neighbors in seed, in counter; another stream
    for a, b in ((centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1]), (centred, other)):
        assert abs((a * b).mean()) < 5 / 12 / math.sqrt(a.size)
    assert uniforms([1 << 70], [1 << 65]).shape == (1,)
    assert uniforms([3, 4], [9, 9])[1] == uniforms([4], [9])[0] != uniforms([4], [9], stream=1)[0]


def test_rows_without_valid_token_raise_with_their_numbers() -> None:
    logits = torch.zeros(5, 4)
    logits[1, 2], logits[2, 0] = math.nan, math.inf
    rows = [SamplerRow(SamplingParams()) for _ in range(5)]
    rows[4].allowed_mask = np.array([False, False, False, True])
    sampler = Sampler(4, banned_ids=(3,))
    for method in (sampler, sampler._sample_reference, sampler.distribution):
        with pytest.raises(NoValidTokenError, match="row 1, 2, 4") as caught:
            method(logits, rows)
        assert caught.value.rows == (1, 2, 4)
    assert all(t.id < 3 for t in sampler(logits[[0, 3]], [rows[0], rows[3]]))
    assert Sampler(4)(logits[:0], []) == []


def test_banned_id_is_never_sampled() -> None:
    logits = torch.tensor([[500.0, 1.0, 2.0]])
    for fields in ({"temperature": 0}, {"temperature": 0.1, "top_p": 1}, {"top_k": 1}):
        (token,) = Sampler(3, (0,))(logits, [SamplerRow(SamplingParams(**fields), top_log_probs=3)])
        assert token.id and token.log_prob > -12
        assert token.raw_log_prob < -400  # it stays unlikely under the model's own distribution
        assert [i for i, _ in token.alternatives] == [2, 1]


def test_extreme_temperatures_are_finite() -> None:
    logits = torch.tensor([[3.0, 3.0, -30.0, -math.inf]])
    for temperature in (1e-320, 1e-12, 1e12, 1e300):
        row = SamplerRow(SamplingParams(temperature=temperature, top_p=1, min_p=1e-6))
        (token,) = Sampler(4)(logits, [row])
        want = distribution(logits, [row])
        assert token.id < 3 and token.log_prob == pytest.approx(math.log(want[0, token.id]), abs=1e-5)
    assert Sampler(4)(logits, [SamplerRow(SamplingParams(temperature=1e300, top_k=1))])[0].id == 0


def test_penalties_follow_growing_and_shrinking_output() -> None:
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    output: list[int] = []
    row = SamplerRow(SamplingParams(temperature=1, top_p=1, **penalties), prompt=(1, 1, 2), output=output)
    row.token_counts = TokenCounts(row.prompt)
    sampler, logits = Sampler(5), torch.ones(1, 5)
    for change in ([4], [4], [1], [], [-1], [-2], [2, 3], [0], [-3, 4, 2, 1], [-2, 4, 4]):
        for number in change:
            if number < 0:
                del output[number:]
            else:
                output.append(number)
        fresh = SamplerRow(row.sampling, prompt=(1, 1, 2), output=list(output))
        assert torch.equal(sampler.distribution(logits, [row]), sampler.distribution(logits, [fresh]))


def test_sampling_params_reject_invalid_values() -> None:
    for wrong in (
        {"temperature": -1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0}, {"top_p": 2},
        {"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0}, {"presence_penalty": 3}, {"frequency_penalty": -3},
        {"logit_bias": {-1: 1}}, {"logit_bias": {1: math.inf}}, {"seed": "x"},
    ):  # fmt: skip
        with pytest.raises(ValidationError):
            SamplingParams(**wrong)  # type: ignore[arg-type]
    SamplingParams(logit_bias={6: 1}).check_ids(7)
    with pytest.raises(ConfigError, match="id 7"):
        SamplingParams(logit_bias={6: 1, 7: 1}).check_ids(7)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_rows_with_a_temperature_alone_need_no_sort(temperature: float) -> None:
    """The path of a GPU for such rows, on the CPU, against the reference's distribution and its draws."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 97, generator=generator) * 3
    logits[:, 5] = 50.0  # banned
    rows = [SamplerRow(SamplingParams(temperature=temperature, top_p=1), seed=n) for n in range(300)]
    sampler = Sampler(97, [5, 60])
    ids, log_probs, raw, log_sums = sampler._sample_plain(logits, rows)
    p = distribution(logits, rows, [5, 60]).double()
    u = torch.from_numpy(uniforms([row.seed for row in rows], [0] * 300))[:, None]
    expected = torch.searchsorted(p.cumsum(-1), u * p.sum(-1, keepdim=True), right=True)
    assert ids.tolist() == expected[:, 0].tolist() and not {5, 60} & set(ids.tolist())
    np.testing.assert_allclose(log_probs, p.gather(-1, expected)[:, 0].log().numpy(), atol=1e-5)
    np.testing.assert_allclose(raw, logits.log_softmax(-1).gather(-1, expected)[:, 0].numpy(), atol=1e-5)
    np.testing.assert_allclose(log_sums, logits.logsumexp(-1).numpy(), rtol=1e-6)
    logits[7] = float("nan")
    with pytest.raises(NoValidTokenError, match="row 7 of"):
        sampler._sample_plain(logits, rows)
