"""Mode covering and mode seeking: one Gaussian fitted to two modes by each divergence.

    .venv/bin/python studies/mode_seeking/figure.py [--picture docs/align_modes.png] [--apart 2.0] [--quick]

The claim: the reverse KL fits one of the modes. The forward KL fits the mean and the standard deviation of the whole.
The ratio compares the distances of both from the nearest mode. A picture needs matplotlib and is skipped without it.
`--quick` changes nothing: the script takes two seconds.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized
from studies.mode_seeking.fit import ModeSeekingResult, mode_curves

STYLES = {
    "forward": ("#1f4e99", "-"),
    "jensen 0.1": ("#4f8fd6", "--"),
    "jensen 0.5": ("#8a5fb0", "-."),
    "jensen 0.9": ("#e08a1e", "--"),
    "reverse": ("#d1431f", "-"),
}
SMALL = {"jensen 0.1": "Jensen-Shannon, β = 0.1", "jensen 0.5": "β = 0.5", "jensen 0.9": "β = 0.9"}


def draw(modes: ModeSeekingResult, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    left.fill_between(modes.x, modes.density, color="#cccccc", label="teacher")
    for name, (colour, line) in STYLES.items():
        fit = modes.fits[name]
        called = {"forward": "forward KL", "reverse": "reverse KL"}.get(name, SMALL.get(name, name))
        left.plot(modes.x, fit.density, color=colour, linestyle=line, label=called, linewidth=1.6)
        right.plot(fit.path[:, 0], fit.path[:, 1], color=colour, linestyle=line, linewidth=1.2)
        right.plot([fit.mean], [fit.std], "o", color=colour)
    left.set(xlabel="x", ylabel="density", title="one Gaussian fitted to two modes")
    left.legend(frameon=False, fontsize=8)
    right.set(xlabel="mean", ylabel="standard deviation", title="path of the best start")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    print(f"wrote {path}")


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--picture", type=Path)
        parser.add_argument("--apart", type=float, default=2.0, help="distance of each mode from 0")
        parser.add_argument("--quick", action="store_true")

    given = parse(__doc__, arguments)
    modes = mode_curves(separation=given.apart, steps=sized(300, 40))
    width = float(modes.x[1] - modes.x[0])
    mean = float((modes.x * modes.density).sum() * width)
    print(f"teacher: modes at -{given.apart:g} (weight 0.6) and {given.apart:g}, mean {mean:.2f}")
    print("| divergence | mean | std | nats |\n|---|---|---|---|")
    for name in STYLES:
        fit = modes.fits[name]
        print(f"| {name} | {fit.mean:.2f} | {fit.std:.2f} | {fit.value:.3f} |")
    if given.picture is not None:
        draw(modes, given.picture)
    far = {name: given.apart - abs(modes.fits[name].mean) for name in ("reverse", "forward")}
    between = abs(modes.fits["forward"].mean - mean) < 0.05
    claim(
        "distance of a unimodal student from the nearest mode: reverse KL",
        ours=abs(far["reverse"]), peer=abs(far["forward"]), peer_name="forward KL", unit="units of x",
        ratio=abs(far["reverse"] / far["forward"]), bar=0.1, ok=abs(far["reverse"]) < 0.1 * far["forward"] and between,
        samples=[{n: [f.mean, f.std, f.value] for n, f in modes.fits.items()}], quick=given.quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
