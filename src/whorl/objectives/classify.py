"""Classification loss: cross-entropy of one label per row, summed over a batch.

    total = sum over rows n of  lse(z_n) - sum_k q_nk z_nk,      q = (1 - e) onehot(label) + e / K

Label smoothing e: Szegedy et al. 2016, arXiv:1512.00567, section 7. With e = 0 it is the negative log-likelihood.
Unlike `next_token`, it takes logits: the head is small and belongs to the network.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss


def classification(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Loss:
    """Return the summed cross-entropy in nats, computed in fp32.

    Args:
        logits: [N, K].
        labels: [N] integers from 0 to K - 1.
        label_smoothing: e above, from 0 to below 1.

    Returns:
        Loss: `total` [] fp32, `count` [] = N, metrics `nll` (without smoothing) and `correct` (rows whose largest
        logit is their label).

    Raises:
        ConfigError: shapes do not fit, or label_smoothing is out of range.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise ConfigError(
            f"logits are {list(logits.shape)} and labels {list(labels.shape)}", expected="[N, K] and [N]"
        )
    if not 0.0 <= label_smoothing < 1.0:
        raise ConfigError(f"label_smoothing is {label_smoothing}", expected="from 0 to below 1")
    log_prob = F.log_softmax(logits.float(), dim=-1)
    nll = -log_prob.gather(1, labels[:, None]).sum()
    total = (
        nll
        if label_smoothing == 0
        else (1 - label_smoothing) * nll - label_smoothing * log_prob.mean(dim=-1).sum()
    )
    correct = (logits.argmax(dim=-1) == labels).sum()
    count = torch.tensor(float(len(labels)), device=logits.device)
    return Loss(total, count, {"nll": nll.detach(), "correct": correct})
