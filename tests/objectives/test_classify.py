"""Classification against torch's cross-entropy."""

from __future__ import annotations

import pytest
import torch
from tests.support.nn.checks import assert_same_losses, gen, randn
from torch.nn import functional as F
from torch.testing import assert_close

from whorl.errors import ConfigError
from whorl.objectives.classify import classification


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_classification_matches_torch(smoothing: float) -> None:
    logits, labels = (randn(7, 5) * 3).requires_grad_(), torch.randint(0, 5, (7,), generator=gen(1))
    loss = classification(logits, labels, smoothing)
    want = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    assert_same_losses(loss.total, want, [logits])
    assert float(loss.count) == 7
    assert_close(loss.metrics["nll"], F.cross_entropy(logits, labels, reduction="sum").detach())
    assert int(loss.metrics["correct"]) == int((logits.argmax(1) == labels).sum())


def test_classification_sums_over_splits_in_fp32() -> None:
    logits, labels = randn(9, 4), torch.randint(0, 4, (9,), generator=gen(1))
    parts = [classification(logits[i : i + 3], labels[i : i + 3], 0.2) for i in (0, 3, 6)]
    assert_close(sum(p.total for p in parts), classification(logits, labels, 0.2).total)
    low = classification(logits.bfloat16(), labels)
    assert low.total.dtype == torch.float32
    assert_close(low.total, classification(logits.bfloat16().float(), labels).total)


def test_classification_rejects_invalid_arguments() -> None:
    logits, labels = torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"labels \[2\]"):
        classification(logits, labels[:2])
    with pytest.raises(ConfigError, match=r"logits are \[3, 1, 4\]"):
        classification(logits[:, None], labels)
    with pytest.raises(ConfigError, match=r"smoothing is 1\.0"):
        classification(logits, labels, 1.0)
