"""Batches of rows: every layout keeps targets, masks and streams, and gives the same step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.align.byte_model import network, sums

from whorl.align.model.batch import micro_batches, pack, pad, sort_by_length
from whorl.align.model.example import TokenizedExample
from whorl.errors import ConfigError
from whorl.parallel.process_group import ProcessGroup
from whorl.train.config import RoutingConfig
from whorl.train.lm.objective import LMObjective
from whorl.train.metrics.moe_balance import MoEBalancer


@st.composite
def texts(draw: st.DrawFn) -> list[TokenizedExample]:
    found = []
    for n in draw(st.lists(st.integers(2, 20), min_size=1, max_size=12)):
        ids = np.array(draw(st.lists(st.integers(1, 99), min_size=n, max_size=n)), np.int64)
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))])
        found.append(TokenizedExample(ids, mask))
    return found


def read_back(
    part: dict[str, torch.Tensor], number: int
) -> tuple[list[int], list[int], list[bool], list[float]]:
    here = part["sequence"] == number
    return tuple(part[name][here].tolist() for name in ("tokens", "targets", "loss_mask", "stream"))


@given(texts(), st.booleans(), st.integers(1, 4))
def test_layout_keeps_targets_masks_and_streams(
    given_texts: list[TokenizedExample], packed: bool, rows: int
) -> None:
    streams = {"stream": [np.arange(len(t), dtype=np.float32) + 100 * n for n, t in enumerate(given_texts)]}
    part = pack(given_texts, 24, 0, streams) if packed else pad(given_texts, 0, streams)
    pieces = [part, *([sort_by_length(part)] if not packed else [])]
    for whole in pieces:
        assert int((whole["sequence"] >= 0).sum()) == sum(len(t) - 1 for t in given_texts)
        for n, text in enumerate(given_texts):
            tokens, targets, mask, stream = read_back(whole, n)
            assert tokens == text.ids[:-1].tolist() and targets == text.ids[1:].tolist()
            assert mask == text.loss_mask[1:].tolist()
            assert stream == streams["stream"][n][1:].tolist()
    together = [
        t for piece in micro_batches(part, rows) for t in piece["targets"][piece["sequence"] >= 0].tolist()
    ]
    assert together == part["targets"][part["sequence"] >= 0].tolist()
    if packed:
        assert (part["positions"][part["sequence"] >= 0] < 24).all()


def test_pack_rejects_long_text() -> None:
    with pytest.raises(ConfigError, match="rows have 4"):
        pack(sums(2), 4, 0)


def test_step_independent_of_layout() -> None:
    """The summed loss and its gradients: one row each, packed, and packed in micro-batches."""
    made = sums(12)
    found = []
    for parts in (
        [pad(made, 0)],
        [pack(made, 40, 0)],
        list(micro_batches(pack(made, 40, 0), 1)),
        list(micro_batches(sort_by_length(pad(made, 0)), 5)),
    ):
        net = network()
        objective = LMObjective(
            net.model, MoEBalancer(net.model, RoutingConfig(), ProcessGroup()), z_loss=0.0, compile=False
        )
        losses = [objective(part) for part in parts]
        sum(loss.total for loss in losses).backward()  # type: ignore[union-attr]
        gradients = {n: p.grad.to_dense() for n, p in net.named_parameters() if p.grad is not None}
        found.append((sum(x.total.item() for x in losses), sum(x.count.item() for x in losses), gradients))
    total, count, gradients = found[0]
    assert count == sum(int(t.loss_mask.sum()) for t in made)
    for other, number, others in found[1:]:
        assert other == pytest.approx(total, rel=1e-5) and number == count
        assert others.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-5)
