"""A preference objective outside of the package: the hinge loss of SLiC (Zhao et al. 2023, arXiv:2305.10425, eq. 1)."""

from __future__ import annotations

from whorl.objectives.preference import PreferenceObjective, pair_loss_of

HINGE = PreferenceObjective(
    lambda pairs, beta, _: pair_loss_of(
        (1 - beta * (pairs.chosen - pairs.rejected)).clamp(min=0), beta * pairs.chosen, beta * pairs.rejected
    ),
    beta=1.0,
    needs_reference=False,
)
