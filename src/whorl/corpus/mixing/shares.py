"""Shares of groups in training: temperature, weights that change over the run, and a limit on epochs.

The share of group i of n_i bytes goes with n_i^(1/T) w_i. T = 1 samples by size; a larger T favors small groups (Conneau
et al. 2020, arXiv:1911.02116, with alpha = 1/T). Weights go linearly from w at the start to w' at the fraction f of the run,
and stay. So the mean share is p f/2 + p' (1 - f/2).

A group is read mean share * D / n_i times in a run of D bytes. Where that is above the limit, the shares of the group are
scaled down to it, and what is freed goes to the other groups in proportion to their shares (water-filling). Up to about 4
epochs, repeated text is nearly worth new text (Muennighoff et al. 2023, arXiv:2305.16264).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from whorl.errors import ConfigError


def mean_shares(shares: NDArray[np.float64], change_until: float) -> NDArray[np.float64]:
    """Return the mean over the run of shares at its start and end, [2, n_groups]."""
    mean: NDArray[np.float64] = shares[0] * change_until / 2 + shares[1] * (1 - change_until / 2)
    return mean


def mixture_shares(
    names: Sequence[str], sizes: NDArray[np.int64], weights: NDArray[np.float64], *, temperature: float,
    train_bytes: int, max_epochs: float, change_until: float = 1.0,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the shares of each group at the start and at the end of the run, [2, n_groups]; each row sums to 1.

    Args:
        names: [n_groups], for error messages.
        sizes: [n_groups] bytes, above 0.
        weights: [2, n_groups] at the start and at the end, not negative.
        train_bytes: bytes that the run reads, repetitions included.
        max_epochs: the most that a group is read.
        change_until: fraction of the run at which the final weights are reached.

    Raises:
        ConfigError: all weights are 0 at the start or at the end, or the groups have too few bytes for the limit.
    """
    shares = weights * sizes.astype(np.float64) ** (1 / temperature)
    if not (shares.sum(axis=1) > 0).all():
        raise ConfigError(
            "all weights of the mixture are 0", expected="a group with a weight above 0 at any time"
        )
    shares /= shares.sum(axis=1, keepdims=True)
    limit = max_epochs * sizes / train_bytes
    capped = np.zeros(len(sizes), bool)
    while True:
        mean = mean_shares(shares, change_until)
        above = ~capped & (mean > limit * (1 + 1e-9))
        if not above.any():
            return shares
        capped |= above
        shares[:, above] *= limit[above] / mean[above]
        free, rest = 1 - shares[:, capped].sum(axis=1), shares[:, ~capped].sum(axis=1)
        if (rest <= 0).any():
            used = [name for name, full in zip(names, capped, strict=True) if full]
            raise ConfigError(
                f"{train_bytes:,} bytes of training need more than {max_epochs:g} epochs of {', '.join(used)}, and no "
                "other group has a weight at that time",
                expected=f"at most {int(max_epochs * sizes[mean > 0].sum()):,} bytes, from all groups together",
                do="set mix.train_bytes lower, mix.max_epochs higher, or give other groups a weight",
            )
        shares[:, ~capped] *= (free / rest)[:, None]
