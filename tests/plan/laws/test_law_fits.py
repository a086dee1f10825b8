"""Laws from losses: published runs, noise-free surfaces, the coverage of intervals, and runs that determine no law."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.surface_runs import PUBLISHED, TRUE, grid, write

from whorl.errors import DataError
from whorl.plan.laws.fits import exponent_by_kaplans_count, fit_law
from whorl.plan.laws.law import ScalingLaw, fitted_law
from whorl.plan.laws.points import Points, check_points, read_csv
from whorl.plan.laws.study import PRIOR
from whorl.plan.laws.surface import fit_surface

DATA = Path(os.environ.get("WHORL_DATA") or Path(__file__).parents[4] / "shared" / "data")
SHORT_STUDY = (
    (2.2125, 1.9382, 1.3788),
    (2.1855, 1.8521, 1.3382),
    (2.2106, 1.9578, 1.4337),
    (2.1922, 1.7436, 1.3270),
    (2.1996, 1.9531, 1.3623),
)
PRINTED_ERRORS = (0.03, 124.58, 0.02, 1293.23, 0.02)


def test_surface_without_noise_is_found_to_1e_6() -> None:
    for sizes, amounts in ((6, 5), (3, 3)):
        assert fit_surface(grid(sizes, amounts)) == pytest.approx(PUBLISHED, rel=1e-6)
    fit = fit_law(grid(8, 8))
    assert fit.exponents["surface"] == pytest.approx(TRUE.exponent, rel=1e-6)
    assert fit.used.all() and abs(fit.residuals).max() < 1e-9
    assert fit.backtest is not None
    assert max(map(abs, fit.backtest.errors)) < 1e-6 < max(map(abs, fit.backtest.kaplan_errors))


@pytest.mark.skipif(
    not (DATA / "chinchilla_points.csv").exists(), reason=f"no chinchilla_points.csv in {DATA}"
)
def test_published_losses_give_published_constants() -> None:
    points = read_csv(DATA / "chinchilla_points.csv")
    fit = fit_law(points)
    assert len(points) == 245 and int((~fit.used).sum()) == 5
    for found, printed, error in zip(fit.law.constants, PUBLISHED, PRINTED_ERRORS, strict=True):
        assert abs(found - printed) < 0.1 * error
    assert fit.exponents["surface"] == pytest.approx(0.512, abs=0.005)  # of the paper
    assert fit.exponents["IsoFLOP"] == pytest.approx(0.49, abs=0.03)  # of Hoffmann et al. 2022, table 2
    assert fit.exponents["envelope"] == pytest.approx(0.50, abs=0.03)
    assert 0.7 < fit.exponents["surface, by Kaplan's count"] < 0.85  # 0.73 in Kaplan et al. 2020
    low, high = fit.law.optimum(5.76e23).parameters_interval
    assert low < 70e9 < high


def test_intervals_cover_the_optimum_at_ten_times_the_compute() -> None:
    flops, covered = 10 * float(grid().flops.max()), 0
    for seed in range(20):
        low, high = (
            fit_law(grid(noise=0.005, seed=seed), seed=seed, samples=100)
            .law.optimum(flops)
            .parameters_interval
        )
        covered += low <= TRUE.optimum(flops).parameters <= high
    assert covered >= 15  # of 20; bench/plan/coverage.py has 200


def test_optimum_is_lowest_along_equal_flops() -> None:
    for law in (TRUE, replace(TRUE, flops_coef=1.7, flops_exponent=0.8), fitted_law()):
        best = law.optimum(1e18)
        sizes = best.parameters * np.exp(np.linspace(-0.5, 0.5, 101))
        losses = law.loss(sizes, law.data_for(1e18, sizes))
        assert losses.argmin() == 50 and losses.min() == pytest.approx(best.loss)
        assert law.flops_for(best.parameters, best.data) == pytest.approx(1e18)
        again = law.optimum(1e20)
        slope = math.log(again.parameters / best.parameters) / math.log(100)
        assert slope == pytest.approx(law.exponent)


def test_kaplans_count_explains_his_exponent() -> None:
    chinchilla = ScalingLaw(1.6934, 406.4, 0.3392, 410.7, 0.2849)
    assert chinchilla.exponent < 0.5 < 0.7 < exponent_by_kaplans_count(chinchilla) < 0.8


def test_law_survives_json_and_warns_far_from_its_runs() -> None:
    law = fit_law(grid(noise=0.005), samples=20).law
    assert ScalingLaw.from_json(law.to_json()) == law
    assert ScalingLaw.from_json(TRUE.to_json()) == TRUE
    high = law.flops[1]
    assert law.extrapolation(high / 2) == 1 and law.extrapolation(10 * high) == pytest.approx(10)
    assert not law.warning(999 * high) and "warning: " in law.warning(1001 * high)
    assert math.isfinite(law.optimum(1e6 * high).loss)


def test_outliers_and_diverged_runs_are_kept_but_not_fitted() -> None:
    points = grid(noise=0.005)
    loss = points.loss.copy()
    loss[3], loss[7] = math.nan, 2 * loss[7]
    fit, expected = fit_law(replace(points, loss=loss), samples=5), np.ones(len(points), bool)
    expected[[3, 7]] = False
    assert (fit.used == expected).all() and len(fit.points) == len(points)
    assert fit.law.constants == pytest.approx(tuple(fit_surface(points.where(expected))))


def test_no_run_of_few_noisy_ones_is_an_outlier() -> None:
    for seed in range(4):
        assert fit_law(grid(3, 3, noise=0.05, seed=seed), samples=5).used.all()


def test_runs_of_a_short_study_have_finite_intervals() -> None:
    """Losses of `whorl plan study quickstart --budget 2.8e13flops`: by seed, of sizes after 1/4, 1/2 and all of the data."""
    rows = [(98304, 2.769e6, losses) for losses in SHORT_STUDY] + [
        (331776, 4.325e6, (1.8834, 1.3060, 1.1201)),
        (589824, 2.660e6, (2.0939, 1.5187, 1.1545)),
        (98304, 1.109e7, (1.5006, 1.1957, 1.0799)),
    ]
    runs = [(n, d * s, loss) for n, d, losses in rows for s, loss in zip((0.25, 0.5, 1), losses, strict=True)]
    n, d, loss = np.array(runs).T
    points = Points(n, d, 6 * n * d, loss, ("",) * len(n))
    law = fit_law(points, prior=PRIOR).law
    assert len(runs) == 24 and all(min(sample[2], sample[4]) > 0 for sample in law.samples)
    for flops in (2e13, 1e15):
        best = law.optimum(flops)
        assert np.isfinite([*best.parameters_interval, *best.loss_interval]).all()


def test_law_with_units_is_the_same_law() -> None:
    points = grid(noise=0.005)
    plain = fit_law(points, samples=10).law
    scaled = fit_law(points, ScalingLaw(0, 1, 1, 1, 1, size_unit=1e6, data_unit=1e9), samples=10).law
    assert scaled.loss(1e8, 1e10) == pytest.approx(plain.loss(1e8, 1e10))
    assert scaled.optimum(1e19).parameters_interval == pytest.approx(plain.optimum(1e19).parameters_interval)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (grid(2, 2), r"4 runs with a finite loss(.|\n)*add runs such as: .* parameters on .* of data"),
        (grid(1, 8), r"1 different sizes(.|\n)*add runs such as: 2\.5e\+05 parameters on 2e\+07 of data"),
        (grid(8, 1), r"1 different amounts of data(.|\n)* on 5e\+06 of data"),
        (
            grid(6, 6).where(np.eye(6, dtype=bool).ravel()),
            r"lie on a line(.|\n)*1e\+06 parameters on 1e\+09 of data",
        ),
    ],
)
def test_runs_without_a_law_are_refused_with_missing_runs(points: Points, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_points(points)
    with pytest.raises(DataError, match=message):
        fit_law(points)


def test_runs_that_all_diverged_are_refused() -> None:
    with pytest.raises(DataError, match=r"0 runs with a finite loss(.|\n)*three sizes"):
        fit_law(replace(grid(3, 3), loss=np.full(9, math.nan)))


def test_csv_mistakes_name_column_and_line(tmp_path: Path) -> None:
    path, points = tmp_path / "runs.csv", grid(3, 3)
    write(path, points, splits=["a"] * 9)
    with pytest.raises(DataError, match=r"unknown column 'splits'(.|\n)*did you mean 'split'"):
        read_csv(path)
    write(path, points, tokenizer=[*"aaaaaaaab"])
    with pytest.raises(DataError, match=r"several tokenizers(.|\n)*a \(8 rows\), b \(1 row\)"):
        read_csv(path)
    path.write_text("parameters,loss\n1,2\n")
    with pytest.raises(
        DataError, match=r"no column training_flops in its first line(.|\n)*tokens: seen in training"
    ):
        read_csv(path)
    path.write_text("parameters,tokens,loss\n1e6,1e7,3.1\n1e6,-4,3.0\n")
    with pytest.raises(DataError, match=r"line 3: tokens is '-4'"):
        read_csv(path)
    path.write_text("parameters,training_flops,loss\n1e6,6e13,nan\n2e6,6e13,3\n")
    read = read_csv(path)
    assert read.finite.tolist() == [False, True] and read.data.tolist() == pytest.approx([1e7, 5e6])
    with pytest.raises(DataError, match="No such file"):
        read_csv(tmp_path / "none.csv")


def test_repeated_data_counts_less(tmp_path: Path) -> None:
    points = grid(3, 3)
    found = read_csv(write(tmp_path / "runs.csv", points, unique_tokens=[1e8] * 9))
    assert found.data[points.data <= 1e8] == pytest.approx(points.data[points.data <= 1e8])
    assert (found.data[points.data > 1e8] < points.data[points.data > 1e8]).all()
