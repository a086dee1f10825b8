"""Blocks remade in the backward: the same bits, fewer bytes, and a plan that keeps to its budget."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from test_transformer import KINDS, made
from torch.nn import functional as F

from whorl.errors import BudgetError
from whorl.models import Decoder, DecoderConfig, LanguageModel
from whorl.models.activation_checkpointing import (
    ActivationMemory,
    LinearActivationMemory,
    measure_activation_memory,
    min_checkpointed_blocks,
    peak_bytes,
)
from whorl.models.language_model import saved_bytes
from whorl.models.transformer_config import MoEConfig

IDS = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(5))
SEGMENTS = (torch.arange(24) >= 9).long().expand(3, 24)
POSITIONS = torch.cat([torch.arange(9), torch.arange(15)]).expand(3, 24)


def decoder(n_layers: int = 3) -> Decoder:
    shape = DecoderConfig(
        vocab_size=50, d_model=32, n_layers=n_layers, n_heads=2, n_kv_heads=1, head_dim=16, mlp_hidden=64, ngram_buckets=64
    )  # fmt: skip
    return Decoder(shape, torch.Generator().manual_seed(0))


def network(kind: str) -> LanguageModel:
    return decoder() if kind == "decoder" else made(**KINDS[kind])


def gradients(model: LanguageModel, remade: int, packed: bool = False) -> tuple[list[Any], list[Any]]:
    """Of a loss that asks everything of the routing too; and the routing's records."""
    model.checkpointed_blocks = remade
    model.zero_grad()
    torch.manual_seed(7)
    records: list[Any] = []
    hidden = model(IDS, POSITIONS, SEGMENTS, None, records) if packed else model(IDS, routings=records)
    loss = F.cross_entropy(model.logits(hidden).flatten(0, 1), IDS.roll(-1, 1).flatten())
    for r in records:
        loss = loss + r.scores.square().mean() + 1e-2 * r.logits.square().mean()
    loss.backward()
    return [None if p.grad is None else p.grad.to_dense() for p in model.parameters()], records


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(x is y or torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_gradients_are_the_same_bits_and_routing_is_told_once(kind: str) -> None:
    model = network(kind)
    wanted, told = gradients(model, 0)
    for remade in range(1, 4):
        found, again = gradients(model, remade)
        assert equal(found, wanted), remade
        assert len(again) == len(told)
        assert all(torch.equal(a.counts, b.counts) for a, b in zip(again, told, strict=True))
    packed, _ = gradients(model, 0, packed=True)
    assert equal(gradients(model, 3, packed=True)[0], packed) and not equal(packed, wanted)


def test_chance_is_drawn_again_as_it_was() -> None:
    """Experts and tokens that are left out."""
    dropped = made(experts=MoEConfig(n_experts=4, top_k=2, hidden=24, token_dropout=0.3, expert_dropout=0.2))
    wanted, _ = gradients(dropped, 0)
    assert equal(gradients(dropped, 3)[0], wanted)
    behind = torch.rand(1)
    gradients(dropped, 0)
    assert torch.equal(torch.rand(1), behind), "and what is drawn after it is the same"


def test_half_precision_has_the_same_bits_too() -> None:
    model = made(torch.bfloat16, **KINDS["gemma"])
    assert equal(gradients(model, 3)[0], gradients(model, 0)[0])


def test_nothing_is_remade_without_gradients_or_while_decoding() -> None:
    model = decoder()
    model.checkpointed_blocks = 3
    with torch.no_grad():
        whole = model(IDS)
    state = model.new_state(3, 24)
    pieces = torch.cat([model(part, state=state) for part in IDS.split(8, dim=1)], 1)
    assert state.length == 24
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)


def test_the_compiler_sees_remade_blocks_too() -> None:
    """Traced whole, in the graph that autograd gets (no code is generated, which takes half a minute)."""
    torch.compiler.reset()
    model = made(**{**KINDS["shared keys"], "n_layers": 2})
    x, where = model.prepare(IDS)
    sizes, found = [], []
    for remade in (0, 1):
        model.checkpointed_blocks = remade
        model.zero_grad()
        fast = torch.compile(
            lambda x, where: model.trunk(x, where), backend="aot_eager_decomp_partition", fullgraph=True
        )
        out: list[Any] = []
        sizes.append(saved_bytes(lambda: out.append(fast(x, where)), model.parameters()))  # noqa: B023
        out[0].square().sum().backward(retain_graph=True)
        found.append([p.grad.clone() for p in model.blocks.parameters() if p.grad is not None])
        torch.compiler.reset()
    assert sizes[1] < 0.7 * sizes[0], sizes
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_what_is_measured_is_what_autograd_keeps(kind: str) -> None:
    model = network(kind)
    kept = measure_activation_memory(model, 24).at_rows(3)
    own = [*model.parameters(), *model.buffers()]
    for remade in range(
        3
    ):  # what the last would keep if remade, hooks cannot see: its input is none of autograd's
        model.checkpointed_blocks = remade
        plain = saved_bytes(lambda: model(IDS, routings=[]), own)
        packed = saved_bytes(lambda: model(IDS, POSITIONS, SEGMENTS, None, []), own)
        assert 0.9 * kept.peak(remade) < max(plain, packed) <= 1.002 * kept.peak(remade), remade
    assert kept.peak(0) > kept.peak(1) > kept.peak(2) == kept.min_peak


def test_the_peak_of_a_step_falls_as_planned() -> None:
    """All tensors that are alive at one time, working memory of the operations included."""
    model = decoder(6)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    ids = torch.randint(0, 50, (8, 64))
    kept = measure_activation_memory(model, 64).at_rows(8)
    peaks = []
    for remade in range(6):
        model.checkpointed_blocks = remade
        peaks.append(peak_bytes(lambda: model(ids).square().sum().backward()))
    for (a, b), count in zip(itertools.pairwise(peaks), range(5), strict=True):
        assert a - b == pytest.approx(kept.peak(count) - kept.peak(count + 1), rel=0.1)
    assert peaks[-1] < 0.35 * peaks[0]


def drawn(rng: random.Random) -> ActivationMemory:
    n = rng.randint(1, 7)
    held = [rng.randint(1, 4)] * n
    inner = [rng.randint(1, 40) for _ in range(n)]
    return ActivationMemory(
        rng.randint(0, 9), tuple(h + i for h, i in zip(held, inner, strict=True)), tuple(held), tuple(inner)
    )


def peak_of_any(kept: ActivationMemory, those: frozenset[int]) -> int:
    """The oracle: walks forward and back with any choice of blocks remade."""
    now, n = kept.outside_blocks, len(kept.saved)
    for b in range(n):
        now += kept.checkpointed[b] if b in those else kept.saved[b]
    peak = now
    for b in reversed(range(n)):
        peak = max(peak, now + (kept.recomputed[b] if b in those else 0))
        now -= kept.checkpointed[b] if b in those else kept.saved[b]
    return peak


def test_the_plan_never_exceeds_a_budget_that_can_be_met_and_asks_for_no_more_than_it_must() -> None:
    rng = random.Random(0)
    for _ in range(200):
        kept = drawn(rng)
        n = len(kept.saved)
        subsets = [frozenset(c) for size in range(n + 1) for c in itertools.combinations(range(n), size)]
        assert kept.min_peak == min(peak_of_any(kept, s) for s in subsets), (
            "no other choice of blocks does better"
        )
        last = n + 1
        for budget in range(kept.min_peak, kept.peak(0) + 2):
            count = min_checkpointed_blocks(kept, budget)
            assert peak_of_any(kept, frozenset(range(count))) == kept.peak(count) <= budget
            assert all(kept.peak(fewer) > budget for fewer in range(count))
            assert count <= last, "a larger budget never remakes more"
            last = count
        assert last == 0
        with pytest.raises(BudgetError, match=f"at least {kept.min_peak:,}"):
            min_checkpointed_blocks(kept, kept.min_peak - 1)


def test_rows_are_a_line() -> None:
    one, two = ActivationMemory(5, (10, 20), (1, 1), (9, 19)), ActivationMemory(6, (18, 36), (2, 2), (16, 34))
    assert (
        LinearActivationMemory(one, two).at_rows(1) == one
        and LinearActivationMemory(one, two).at_rows(2) == two
    )
    assert LinearActivationMemory(one, two).at_rows(4) == ActivationMemory(8, (34, 68), (4, 4), (30, 64))
