"""Batches of rows: every layout keeps targets, masks and streams, and gives the same step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.align.byte_model import network, sums

from whorl.align.model.batch import micro_batches, pack, pad, sort_by_length
from whorl.errors import ConfigError
from whorl.parallel.process_group import ProcessGroup
from whorl.tokens.token_encoder import TokenizedExample
from whorl.train.config import RoutingConfig
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer


@st.composite
def lists_of_texts(draw: st.DrawFn) -> list[TokenizedExample]:
    found = []
    for n in draw(st.lists(st.integers(2, 20), min_size=1, max_size=12)):
        ids = np.array(draw(st.lists(st.integers(1, 99), min_size=n, max_size=n)), np.int64)
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
        found.append(TokenizedExample(ids, mask))
    return found


@given(lists_of_texts(), st.booleans(), st.integers(1, 4))
def test_layout_keeps_targets_masks_and_streams(
    texts: list[TokenizedExample], packed: bool, rows: int
) -> None:
    streams = [np.arange(len(t), dtype=np.float32) + 100 * n for n, t in enumerate(texts)]
    part = pack(texts, 24, 0, {"stream": streams}) if packed else pad(texts, 0, {"stream": streams})
    for whole in [part] if packed else [part, sort_by_length(part)]:
        assert int((whole["sequence"] >= 0).sum()) == sum(len(t) - 1 for t in texts)
        for n, text in enumerate(texts):
            here = whole["sequence"] == n
            wanted = (text.ids[:-1], text.ids[1:], text.loss_mask[1:], streams[n][1:])
            for name, want in zip(("tokens", "targets", "loss_mask", "stream"), wanted, strict=True):
                assert whole[name][here].tolist() == want.tolist()
    pieces = [piece["targets"][piece["sequence"] >= 0] for piece in micro_batches(part, rows)]
    assert torch.equal(torch.cat(pieces), part["targets"][part["sequence"] >= 0])
    if packed:
        assert (part["positions"][part["sequence"] >= 0] < 24).all()


def test_pack_rejects_long_text() -> None:
    with pytest.raises(ConfigError, match="rows have 4"):
        pack(sums(2), 4, 0)


def test_step_independent_of_layout() -> None:
    """The summed loss and its gradients: one row each, packed, and packed in micro-batches."""
    made = sums(12)
    rows, packed = pad(made, 0), pack(made, 40, 0)
    found = []
    for parts in ([rows], [packed], micro_batches(packed, 1), micro_batches(sort_by_length(rows), 5)):
        net = network()
        balancer = MoEBalancer(net.model, RoutingConfig(), ProcessGroup())
        losses = [LMObjective(net.model, balancer, z_loss=0.0, compile=False)(part) for part in parts]
        sum(loss.total for loss in losses).backward()  # type: ignore[union-attr]
        gradients = {n: p.grad.to_dense() for n, p in net.named_parameters() if p.grad is not None}
        found.append((sum(x.total.item() for x in losses), sum(x.count.item() for x in losses), gradients))
    total, count, gradients = found[0]
    assert count == sum(int(t.loss_mask.sum()) for t in made)
    for other, number, others in found[1:]:
        assert other == pytest.approx(total, rel=1e-5) and number == count
        torch.testing.assert_close(others, gradients, rtol=1e-4, atol=1e-5)
