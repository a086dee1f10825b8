"""Markdown tables and a plot from the results of `bench/models/synthetic_tasks.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

Runs = dict[str, dict[str, Any]]

# Colours by family: attention blue, gated recurrent state orange and red, linear green, no gates grey.
STYLES = {
    "attention": ("#1f4e99", "-", "o"),
    "experts": ("#1f4e99", "-.", "*"),
    "smeared": ("#4f8fd6", "-", "s"),
    "convolved": ("#86b9ea", "-", "^"),
    "latent": ("#1f4e99", "--", "D"),
    "window 16": ("#7a7fb8", ":", "v"),
    "pointwise": ("#8a5fb0", "--", "P"),
    "pointwise, convolved": ("#8a5fb0", "-", "^"),
    "linear": ("#2c8a4b", "--", "o"),
    "linear, decay": ("#2c8a4b", "-.", "s"),
    "linear, convolved": ("#2c8a4b", "-", "^"),
    "Mamba": ("#d1431f", "-", "o"),
    "not selective": ("#d1431f", ":", "x"),
    "GRU": ("#e08a1e", "-", "o"),
    "LSTM": ("#e0b21e", "-", "s"),
    "RNN": ("#8c8c8c", "-", "x"),
}
NAMES = {"not selective": "Mamba, not selective", "experts": "8 experts, top 2", "attention": "attention"}


def seeds_of(runs: Runs, task: str, kind: str, how: str = "") -> list[dict[str, Any]]:
    """Results of all seeds of one kind, without tuning runs."""
    keys = [key for key in runs if key.startswith(f"{task}/{kind}/") and "/tuning/" not in key]
    return [runs[key] for key in sorted(keys) if key.endswith(how)]


def kinds_of(runs: Runs, task: str) -> list[str]:
    """Kinds with results, in the order of `STYLES`."""
    found = {k.split("/")[1] for k in runs if k.startswith(f"{task}/") and "/tuning/" not in k}
    return sorted(found, key=list(STYLES).index)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def tables(runs: Runs) -> str:
    """Markdown tables: synthetic tasks, steps until induction heads form, text."""
    made_up = [_made_up(runs, t) for t in ("recall", "copying", "copying longer") if kinds_of(runs, t)]
    parts = [*made_up, _repetition(runs), _text(runs), _text(runs, "text longer", ("compute",))]
    return "\n\n".join(part for part in parts if part)


def _made_up(runs: Runs, task: str) -> str:
    lines: list[str] = []
    for kind in kinds_of(runs, task):
        found = seeds_of(runs, task, kind)
        sizes = list(found[0]["accuracy"])
        if not lines:
            unit = "pairs" if task == "recall" else "tokens"
            lines = [
                f"| {task}, share correct | rate | {' | '.join(f'{s} {unit}' for s in sizes)}, each seed | steps |",
                "|---" * (3 + len(sizes)) + "|",
            ]
        means = [f"{mean([f['accuracy'][s] for f in found]):.2f}" for s in sizes[:-1]]
        last = ", ".join(f"{f['accuracy'][sizes[-1]]:.2f}" for f in found)
        steps = ", ".join(str(f["reached"] or f"({f['steps']})") for f in found)
        lines.append(
            f"| {NAMES.get(kind, kind)} | {found[0]['rate']:g} | {' | '.join(means)} | {last} | {steps} |"
        )
    return "\n".join(lines)


def _repetition(runs: Runs) -> str:
    lines = [
        "| induction heads: steps until | rate | 50 % correct, each seed | 90 % | 99 % |",
        "|---|---|---|---|---|",
    ]
    for kind in kinds_of(runs, "repetition"):
        found = seeds_of(runs, "repetition", kind)
        cells = [", ".join(str(first(f, share)) for f in found) for share in (0.5, 0.9, 0.99)]
        lines.append(f"| {NAMES.get(kind, kind)} | {found[0]['rate']:g} | {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def first(run: dict[str, Any], share: float) -> int | str:
    """The step of the first evaluation with at least this share correct."""
    reached = [n for n, x in enumerate(run["evaluations"], start=1) if x >= share]
    return reached[0] * run["every"] if reached else f"not in {run['steps']}"


def _text(runs: Runs, task: str = "text", ways: Sequence[str] = ("compute", "seconds")) -> str:
    head = f"| {task}, bits per character | rate | parameters (active) |"
    head += "".join(f" equal {how}, each seed | mean | steps | CPU s |" for how in ways)
    lines = [head, "|---" * (3 + 4 * len(ways)) + "|"]
    for kind in kinds_of(runs, task):
        all_found = [seeds_of(runs, task, kind, how) for how in ways]
        if not all(all_found):
            continue
        one = all_found[0][0]
        cells = [
            NAMES.get(kind, kind),
            f"{one['rate']:g}",
            f"{one['total'] / 1e3:,.0f} k ({one['active'] / 1e3:,.0f} k)",
        ]
        for found in all_found:
            bits = [f["bits"] for f in found]
            cells += [", ".join(f"{b:.3f}" for b in bits), f"**{mean(bits):.3f}**"]
            cells += [f"{mean([f[x] for f in found]):.0f}" for x in ("steps", "cpu_seconds")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def draw(runs: Runs, path: Path) -> None:
    """Write four panels as a PNG. Without matplotlib, print a note and return."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    figure = Figure(figsize=(13, 9.6), layout="constrained")
    (one, two), (three, four) = figure.subplots(2, 2)
    _curves(one, runs, "recall", "Associative recall: share of correct values", 1 / 32)
    _curves(two, runs, "copying", "Selective copying: share of correct tokens", 1 / 16)
    _bits(three, runs)
    _below(four, runs)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"plot: {path}")


def _curves(axis: Any, runs: Runs, task: str, title: str, chance: float) -> None:
    """Plot accuracy over size: a line through the means and a dot per seed."""
    ends = []
    for kind in kinds_of(runs, task):
        found = seeds_of(runs, task, kind)
        colour, line, marker = STYLES[kind]
        sizes = [int(s) for s in found[0]["accuracy"]]
        means = [mean([f["accuracy"][str(s)] for f in found]) for s in sizes]
        axis.plot(range(len(sizes)), means, line, color=colour, marker=marker, markersize=5, linewidth=1.6)
        for f in found:
            axis.plot(
                range(len(sizes)), list(f["accuracy"].values()), ".", color=colour, markersize=3, alpha=0.6
            )
        ends.append((means[-1], NAMES.get(kind, kind), colour, len(sizes) - 1))
        axis.set_xticks(range(len(sizes)), [str(s) for s in sizes])
    for kind in kinds_of(runs, f"{task} longer"):
        found = seeds_of(runs, f"{task} longer", kind)
        means = [mean(list(each)) for each in zip(*(f["accuracy"].values() for f in found), strict=True)]
        colour, last = STYLES[kind][0], len(means) - 1
        axis.plot(
            range(len(means)), means, "-", color=colour, linewidth=0.9, marker="o", markerfacecolor="white"
        )
        most = max(f["steps"] for f in found)
        few = ", 1 seed" if len(found) == 1 else ""
        ends.append((means[-1], f"{NAMES.get(kind, kind)}, {most:,} steps{few}", colour, last))
    # Labels at the line ends. Overlapping labels are moved: upwards, then down from the top.
    ends.sort()
    heights, gap = [end[0] for end in ends], 0.05
    for n in range(1, len(ends)):
        heights[n] = max(heights[n], heights[n - 1] + gap)
    for n in range(len(ends) - 1, -1, -1):
        heights[n] = min(heights[n], (heights[n + 1] - gap) if n + 1 < len(ends) else 1.02)
    for (value, name, colour, last), height in zip(ends, heights, strict=True):
        axis.annotate(
            name, (last, value), (last + 0.18, height), color=colour, fontsize=8.5, va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5}, annotation_clip=False,
        )  # fmt: skip
    axis.axhline(chance, color="#bbbbbb", linewidth=0.8, linestyle="--")
    axis.text(0, chance + 0.012, "chance", fontsize=7.5, color="#999999", va="bottom")
    if ends:
        axis.set_xlim(-0.15, ends[0][3] + 1.6)
    axis.set_ylim(0, 1.05)
    axis.set_title(title, fontsize=11, loc="left")
    axis.set_xlabel("pairs to remember" if task == "recall" else "tokens to copy, among 5 x as much noise")
    _plain(axis)


def _bits(axis: Any, runs: Runs) -> None:
    """Plot bits per character: one dot per seed, filled for equal compute, hollow for equal CPU seconds."""
    kinds = sorted(
        (k for k in kinds_of(runs, "text") if seeds_of(runs, "text", k, "seconds")),
        key=lambda k: -mean([f["bits"] for f in seeds_of(runs, "text", k, "compute")]),
    )
    looks = (
        ("compute", "equal compute (FLOPs of training)", "#1f4e99", 0.14),
        ("seconds", "equal CPU seconds, one thread", "none", -0.14),
    )
    long = kinds_of(runs, "text longer")
    for how, label, face, shift in looks:
        found = [[f["bits"] for f in seeds_of(runs, "text", kind, how)] for kind in kinds]
        dots = [(b, row + shift) for row, bits in enumerate(found) for b in bits]
        if dots:
            x, y = zip(*dots, strict=True)
            axis.scatter(x, y, s=34, facecolors=face, edgecolors="#1f4e99", label=label)
        for row, bits in enumerate(found):
            at = (max(bits) + 0.012, row + shift)
            axis.text(*at, f"{mean(bits):.3f}", fontsize=8, va="center", color="#444444")
    names = [NAMES.get(k, k) for k in kinds]
    for row, kind in enumerate(long, start=len(kinds)):
        found_long = seeds_of(runs, "text longer", kind)
        bits = [f["bits"] for f in found_long]
        words = "equal compute, 3 times as much" if kind == long[0] else None
        axis.scatter(bits, [row] * len(bits), s=34, marker="^", color="#1f4e99", label=words)
        axis.text(max(bits) + 0.012, row, f"{mean(bits):.3f}", fontsize=8, va="center", color="#444444")
        names.append(f"{NAMES.get(kind, kind)},\n{found_long[0]['steps']:,} steps")
    axis.set_yticks(range(len(names)), names)
    axis.margins(x=0.12)
    axis.set_title("Text: bits per character, held out (lower is better)", fontsize=11, loc="left")
    if kinds:
        axis.legend(fontsize=8, frameon=False, loc="best")
    _plain(axis)


def _below(axis: Any, runs: Runs) -> None:
    """Plot accuracy on repetition by step (upper), and the load of the experts (lower)."""
    axis.axis("off")
    upper, lower = axis.inset_axes((0.12, 0.66, 0.86, 0.34)), axis.inset_axes((0.12, 0.0, 0.86, 0.46))
    for kind in kinds_of(runs, "repetition"):
        for seed, f in enumerate(seeds_of(runs, "repetition", kind)):
            steps = [f["every"] * n for n in range(len(f["evaluations"]) + 1)]
            label = NAMES.get(kind, kind) if seed == 0 else None
            upper.plot(steps, [1 / 64, *f["evaluations"]], color=STYLES[kind][0], linewidth=1.3, label=label)
    upper.set_ylim(0, 1.04)
    upper.legend(fontsize=8, frameon=False, loc="lower right")
    upper.set_title("Induction heads: accuracy on repeated random ids, by step", fontsize=11, loc="left")
    _plain(upper)
    found = seeds_of(runs, "text longer", "experts") or seeds_of(runs, "text", "experts", "compute")
    for seed, f in enumerate(found):
        for layer, loads in enumerate(f["loads"]):
            offset = (seed * 2 + layer - 2.5) * 0.13
            lower.bar(
                [e + offset for e in range(len(loads))], loads, width=0.12, color=("#1f4e99", "#86b9ea")[layer],
                label=f"layer {layer + 1}, one bar per seed" if seed == 0 else None,
            )  # fmt: skip
    if found:
        even = 1 / len(found[0]["loads"][0])
        lower.axhline(even, color="#d1431f", linewidth=1, linestyle="--", label="even")
        lower.set_xticks(
            range(len(found[0]["loads"][0])), [str(e + 1) for e in range(len(found[0]["loads"][0]))]
        )
        lower.set_ylim(0, 2.4 * even)
        lower.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")
    lower.set_title("Experts: share of held-out tokens per expert", fontsize=11, loc="left")
    lower.set_xlabel("expert")
    _plain(lower)


def _plain(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    axis.tick_params(labelsize=9)
    axis.grid(axis="both", color="#eeeeee", linewidth=0.7)
    axis.set_axisbelow(True)
