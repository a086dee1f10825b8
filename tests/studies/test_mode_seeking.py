"""One Gaussian fitted to two modes: the result of each divergence."""

from __future__ import annotations

import pytest
import torch
from studies.mode_seeking.fit import ModeSeekingResult, mode_curves

from whorl.objectives.distil import divergence


@pytest.fixture(scope="module")
def modes() -> ModeSeekingResult:
    return mode_curves(separation=2.0, std=0.6, weight=0.6)


def test_reverse_fits_larger_mode(modes: ModeSeekingResult) -> None:
    fit = modes.fits["reverse"]
    assert fit.mean == pytest.approx(-2.0, abs=0.02) and fit.std == pytest.approx(0.6, abs=0.02)
    assert fit.value == pytest.approx(-torch.tensor(0.6).log().item(), abs=0.01)
    other = modes.x > 0.5
    assert float(fit.density[other].sum() / fit.density.sum()) < 1e-3


def test_fits_match_grid_search(modes: ModeSeekingResult) -> None:
    """A grid search over means and deviations finds the same fits."""
    width = float(modes.x[1] - modes.x[0])
    teacher = (modes.density * width).log()
    means, deviations = torch.meshgrid(torch.linspace(-3, 3, 61), torch.linspace(0.3, 3, 55), indexing="ij")
    z = (modes.x - means.flatten()[:, None]) / deviations.flatten()[:, None]
    students = (-0.5 * z**2).log_softmax(-1)
    for name, kind in (("forward", "forward"), ("reverse", "reverse"), ("jensen 0.5", "jensen")):
        least = float(divergence(teacher, students, kind).min())  # type: ignore[arg-type]
        assert modes.fits[name].value <= least + 1e-4
