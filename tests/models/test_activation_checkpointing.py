"""Activation checkpointing: bit-identical gradients, less memory, and a plan that keeps to its budget."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from tests.support.models.transformer_shapes import KINDS, made, network
from tests.support.tiny import make_decoder
from tests.support.train.live_tensors import peak_bytes
from torch.nn import functional as F

from whorl.errors import BudgetError
from whorl.models import LanguageModel
from whorl.models.activation_checkpointing import (
    ActivationMemory,
    LinearActivationMemory,
    measure_activation_memory,
    min_checkpointed_blocks,
)
from whorl.models.language_model import saved_bytes
from whorl.models.transformer_config import MoEConfig

IDS = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(5))
SEGMENTS = (torch.arange(24) >= 9).long().expand(3, 24)
POSITIONS = torch.cat([torch.arange(9), torch.arange(15)]).expand(3, 24)


def gradients(model: LanguageModel, n: int, packed: bool = False) -> tuple[list[Any], list[Any]]:
    """Return the gradients of a loss that includes the routing, and the routings."""
    model.checkpointed_blocks = n
    model.zero_grad()
    torch.manual_seed(7)
    routings: list[Any] = []
    hidden = model(IDS, POSITIONS, SEGMENTS, None, routings) if packed else model(IDS, routings=routings)
    loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), IDS.roll(-1, 1).flatten())
    for r in routings:
        loss = loss + r.scores.square().mean() + 1e-2 * r.logits.square().mean()
    loss.backward()
    return [None if p.grad is None else p.grad.to_dense() for p in model.parameters()], routings


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["decoder", *KINDS, "bf16"])
def test_checkpointing_keeps_gradients_and_routings(kind: str) -> None:
    model = made(torch.bfloat16, **KINDS["gemma"]) if kind == "bf16" else network(kind)
    expected, routings = gradients(model, 0)
    for n in range(1, 4):
        found, again = gradients(model, n)
        assert equal(found, expected), n
        assert len(again) == len(routings)
        assert all(torch.equal(a.counts, b.counts) for a, b in zip(again, routings, strict=True))
    packed, _ = gradients(model, 0, packed=True)
    assert equal(gradients(model, 3, packed=True)[0], packed) and not equal(packed, expected)


def test_checkpointing_repeats_dropout_and_random_state() -> None:
    dropped = made(experts=MoEConfig(n_experts=4, top_k=2, hidden=24, token_dropout=0.3, expert_dropout=0.2))
    expected, _ = gradients(dropped, 0)
    assert equal(gradients(dropped, 3)[0], expected)
    after = torch.rand(1)
    gradients(dropped, 0)
    assert torch.equal(torch.rand(1), after)


def test_checkpointing_is_off_in_inference_and_decoding() -> None:
    model = network("decoder")
    model.checkpointed_blocks = 3
    with torch.no_grad():
        whole = model(IDS)
    state = model.new_state(3, 24)
    pieces = torch.cat([model(part, state=state) for part in IDS.split(8, dim=1)], 1)
    assert state.length == 24
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_checkpointing_saves_memory_when_compiled() -> None:
    """Traced as one graph, with the backend that stops before code generation."""
    torch.compiler.reset()
    model = made(**{**KINDS["shared keys"], "n_layers": 2})
    sizes, found = [], []
    for n in (0, 1):
        x, where = model.prepare(IDS)
        model.checkpointed_blocks = n
        model.zero_grad()
        fast = torch.compile(model.trunk, backend="aot_eager_decomp_partition", fullgraph=True)
        out: list[Any] = []
        sizes.append(saved_bytes(lambda: out.append(fast(x, where)), model.parameters()))  # noqa: B023
        out[0].square().sum().backward()
        found.append([p.grad.clone() for p in model.blocks.parameters() if p.grad is not None])
        torch.compiler.reset()
    assert sizes[1] < 0.7 * sizes[0], sizes
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_measured_memory_matches_autograd(kind: str) -> None:
    model = network(kind)
    rows = 3 if kind == "lstm" else 4  # more rows than are measured; an LSTM keeps more from four rows on
    memory = measure_activation_memory(model, 24).at_rows(rows)
    ids, positions, segments = (t.repeat(2, 1)[:rows] for t in (IDS, POSITIONS, SEGMENTS))
    weights = [*model.parameters(), *model.buffers()]
    for n in range(3):  # autograd does not save the input of the last block, so hooks do not see it
        model.checkpointed_blocks = n
        plain = saved_bytes(lambda: model(ids, routings=[]), weights)
        packed = saved_bytes(lambda: model(ids, positions, segments, None, []), weights)
        assert 0.9 * memory.peak(n) < max(plain, packed) <= 1.002 * memory.peak(n), n
    assert memory.peak(0) > memory.peak(1) > memory.peak(2) == memory.min_peak


def test_peak_of_step_falls_as_predicted() -> None:
    """The peak of live tensors, working memory of operations included."""
    model = make_decoder(vocab_size=50, n_layers=6)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ids = torch.randint(0, 50, (8, 64))
    memory = measure_activation_memory(model, 64).at_rows(8)
    peaks = []
    for n in range(6):
        model.checkpointed_blocks = n
        peaks.append(peak_bytes(lambda: model(ids).square().sum().backward()))
    for (a, b), count in zip(itertools.pairwise(peaks), range(5), strict=True):
        assert a - b == pytest.approx(memory.peak(count) - memory.peak(count + 1), rel=0.1)
    assert peaks[-1] < 0.35 * peaks[0]


def random_memory(rng: random.Random) -> ActivationMemory:
    n, size = rng.randint(1, 7), rng.randint(1, 4)
    recomputed = tuple(rng.randint(1, 40) for _ in range(n))
    return ActivationMemory(rng.randint(0, 9), tuple(size + i for i in recomputed), (size,) * n, recomputed)


def peak_of_any(memory: ActivationMemory, blocks: frozenset[int]) -> int:
    """Return the peak by simulation, with any set of checkpointed blocks."""
    now, n = memory.outside_blocks, len(memory.saved)
    for b in range(n):
        now += memory.checkpointed[b] if b in blocks else memory.saved[b]
    peak = now
    for b in reversed(range(n)):
        peak = max(peak, now + (memory.recomputed[b] if b in blocks else 0))
        now -= memory.checkpointed[b] if b in blocks else memory.saved[b]
    return peak


def test_min_checkpointed_blocks_is_optimal() -> None:
    rng = random.Random(0)
    for _ in range(200):
        memory = random_memory(rng)
        n = len(memory.saved)
        subsets = [frozenset(c) for size in range(n + 1) for c in itertools.combinations(range(n), size)]
        assert memory.min_peak == min(peak_of_any(memory, s) for s in subsets)  # no set has a lower peak
        last = n + 1
        for budget in range(memory.min_peak, memory.peak(0) + 2):
            count = min_checkpointed_blocks(memory, budget)
            assert peak_of_any(memory, frozenset(range(count))) == memory.peak(count) <= budget
            assert all(memory.peak(smaller) > budget for smaller in range(count))
            assert count <= last, "a larger budget never checkpoints more"
            last = count
        assert last == 0
        with pytest.raises(BudgetError, match=f"at least {memory.min_peak:,}"):
            min_checkpointed_blocks(memory, memory.min_peak - 1)


def test_activation_memory_is_linear_in_rows() -> None:
    one, two = ActivationMemory(5, (10, 20), (1, 1), (9, 19)), ActivationMemory(6, (18, 36), (2, 2), (16, 34))
    three = ActivationMemory(7, (27, 54), (3, 3), (24, 50))
    memory = LinearActivationMemory(one, two, three)
    assert [memory.at_rows(n) for n in (1, 2, 3)] == [one, two, three]
    assert memory.at_rows(5) == ActivationMemory(9, (45, 90), (5, 5), (40, 82))
