"""The blocks of a training run: curves, a sentence on the onset of induction, events, expert loads, headline figures.

All curves share one range of steps, so that the drop of the loss, the induction loss and the learning rate line up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whorl.report.blocks import (
    Block,
    Card,
    Cell,
    Column,
    Curve,
    Facts,
    Folded,
    HeatMap,
    Line,
    StepReport,
    Table,
    Text,
)
from whorl.report.format import NBSP, format_duration, format_percent, format_quantity, format_si
from whorl.report.induction_onset import (
    CurvePoint,
    InductionPoint,
    LossDrop,
    find_induction_onset,
    find_loss_drop,
    smooth,
)

MAX_EVENTS = 50  # rows of the table
Records = Sequence[Mapping[str, Any]]


def training_report(
    records: Records,
    summary: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    expected: Mapping[str, float],
    objective: str,
) -> StepReport:
    """Return the report of a pretraining run.

    Args:
        records: metrics and events of all steps, as in `curve.json`.
        summary: figures of the step (`seconds`, `tokens`, `params`, ...).
        config: shape of the network, as in `config.json`.
        expected: figures of the plan; empty without one.
        objective: name of the objective in `objectives/catalog.py`.
    """
    speed = summary.get("tokens_per_second")
    mfu = None
    if speed and expected.get("tokens_per_second"):
        mfu = min(1.0, expected["mfu"] * speed / expected["tokens_per_second"])
    params, seconds, tokens = summary["params"], summary["seconds"], summary["tokens"]
    cards = [_card("Parameters", format_si(params["total"], ""))]
    cards.append(_card("Tokens trained on", format_si(tokens, ""), f"in {summary['steps']:,} steps"))
    planned = f"planned: {format_duration(expected['seconds'])}" if expected.get("seconds") else ""
    cards.append(Card(label="Training time", value=format_duration(seconds), more=planned))
    if speed:
        more = f"{format_percent(mfu)} of the measured peak" if mfu is not None else ""
        cards.append(Card(label="Speed", value=f"{speed:,.0f}", unit="tokens/s", more=more))
    if (bits := summary.get("final", {}).get("held_out_bits_per_byte")) is not None:
        cards.append(Card(label="Bits per byte, validation", value=f"{bits:.3f}", number=bits))
    blocks: list[Block] = [*training_blocks(records, objective)]
    if summary.get("peak_memory_bytes") is not None:
        peak = format_si(summary["peak_memory_bytes"], "B")
        blocks.append(Facts(section="Training", rows=[("peak memory", peak)]))
    actual = {
        "seconds": seconds, "tokens_per_second": speed, "memory_bytes": summary.get("peak_memory_bytes"), "mfu": mfu,
        "first_step_seconds": summary.get("first_step_seconds"),
    }  # fmt: skip
    if expected:
        blocks.append(plan_table(expected, actual))
    blocks.append(model_facts(config, params, summary.get("checkpoints")))
    return StepReport(cards=cards, blocks=blocks)


def _card(label: str, quantity: str, more: str = "") -> Card:
    value, _, unit = quantity.partition(NBSP)
    return Card(label=label, value=value, unit=unit, more=more)


def training_blocks(records: Records, objective: str = "") -> Iterator[Block]:
    """Yield the curves of the section "Training", and the table of events; nothing without a loss."""
    points = [
        CurvePoint(r["step"], r["nll"], r.get("learning_rate"), r.get("seconds"))
        for r in records
        if "nll" in r
    ]
    if not points:
        return
    induction = [InductionPoint(r["step"], r["induction_nll"]) for r in records if "induction_nll" in r]
    drop = find_induction_onset(induction, points) or find_loss_drop(points)
    lines = [f"Drop of the loss: {describe_loss_drop(drop)}"] if drop else []
    lines = lines or ["The loss decreased smoothly; no sudden drop was found."]
    overfits = [f"{r['message']}; {r['action']}." for r in records if r.get("event") == "overfitting"]
    lines += [f"Overfitting at step {points[-1].step:,}: {line}" for line in overfits[-1:]]
    lines += [f"{r['message']}; {r['action']}." for r in records if r.get("event") == "behind"]
    yield Text(section="Training", lines=[*objective_lines(objective), *lines])
    yield from _curves(records, points, induction, drop)
    yield from event_table(records)


def objective_lines(name: str) -> list[str]:
    """Return one line with the objective's name, formula and paper; none if the catalog does not have it."""
    from whorl.objectives.catalog import CATALOG

    info = CATALOG.get(name)
    return [] if info is None else [f"Objective {info.name}: {info.formula} ({info.paper})"]


def _curves(
    records: Records, points: Sequence[CurvePoint], induction: Sequence[InductionPoint], drop: LossDrop | None
) -> Iterator[Block]:
    steps = [float(point.step) for point in points]
    losses = [point.loss for point in points]
    curve = [float(value) for value in smooth(losses, len(losses) / 150)]
    x_range = (0.0, steps[-1])
    mark = (float(drop.step), f"drop, step {drop.step:,}") if drop else None
    # The first steps start at the logarithm of the vocabulary; including them would flatten the rest.
    top = max(curve[len(curve) // 40 :])
    low = min(min(curve), *sorted(losses)[len(losses) // 100 :][:1])
    yield Curve(
        section="Training", title="Training loss", note="Nats per token: every step, and smoothed.", height=260,
        lines=[Line(name="every step", x=steps, y=losses, style="faint"), Line(name="smoothed", x=steps, y=curve)],
        label=f"Training loss against step, from {losses[0]:.2f} to {curve[-1]:.2f} nats per token",
        x_range=x_range, y_range=(low, max(top, low)), mark=mark,
    )  # fmt: skip
    key, most = "held_out_bits_per_byte", ""
    if any(f"{key}_bound" in r for r in records):  # of masked diffusion
        key, most = f"{key}_bound", "at most "
    bits = [(r["step"], r[key]) for r in records if key in r]
    if bits:
        note = "Of rows spread over the validation split, without the text before them; test files are read whole."
        bound = " An upper bound: the mean loss of all orders of a block's tokens."
        yield Curve(
            section="Training", title="Validation bits per byte" + (", upper bound" if most else ""), height=190,
            x_range=x_range, mark=mark, note=note + (bound if most else ""), lines=[_line("bits per byte", bits)],
            label=f"Validation bits per byte against step, ending at {most}{bits[-1][1]:.3f}",
        )  # fmt: skip
    if induction:
        yield Curve(
            section="Training", title="Induction", height=150, x_range=x_range, mark=mark,
            note="Nats per token on the second half of rows that repeat shuffled tokens. Only induction heads can "
            "lower it.",
            lines=[_line("second half", [(point.step, point.nll) for point in induction])],
            label=f"Induction loss against step, ending at {induction[-1].nll:.2f} nats per token",
        )  # fmt: skip
    if layers := sorted({int(k.split("/")[1]) for r in records for k in r if re.match(r"moe/\d", k)}):
        yield _expert_curve(layers, records, x_range)
    rates = [(p.step, p.learning_rate) for p in points if p.learning_rate is not None]
    if rates:
        yield Curve(
            section="Training", title="Learning rate", note="Learning rate of the weight matrices at each step.",
            lines=[_line("learning rate", rates, dots=0)], label="Learning rate against step", height=150,
            x_range=x_range, y_range=(0.0, max(rate for _, rate in rates)),
        )  # fmt: skip


def _line(name: str, points: Sequence[tuple[int, float]], dots: int = 60) -> Line:
    """Return a line, with dots if it has at most `dots` points."""
    return Line(
        name=name, x=[float(x) for x, _ in points], y=[y for _, y in points], dots=len(points) <= dots
    )


def _expert_curve(layers: Sequence[int], records: Records, x_range: tuple[float, float]) -> Curve:
    """Return the load imbalance: the Gini coefficient of every layer, and the mean over layers."""
    ginis = {n: [(r["step"], r[f"moe/{n}/gini"]) for r in records if f"moe/{n}/gini" in r] for n in layers}
    steps = sorted({step for points in ginis.values() for step, _ in points})
    at = {step: [gini for points in ginis.values() for s, gini in points if s == step] for step in steps}
    means = [sum(at[step]) / len(at[step]) for step in steps]
    last = dict[str, Any]()
    for record in records:
        last |= record
    shares = {n: [v for k, v in last.items() if k.startswith(f"moe/{n}/load_fraction/")] for n in layers}
    flat = [share for of_layer in shares.values() for share in of_layer]
    dropped = max(r.get(f"moe/{n}/dropped_fraction", 0.0) for r in records for n in layers)
    lines = [
        _line(f"layer {n}", points, dots=0).model_copy(update={"style": "faint"})
        for n, points in ginis.items()
    ]
    return Curve(
        section="Training", title="Experts", height=170, x_range=x_range, y_range=(0.0, max(0.1, *means)),
        note="Gini coefficient of the expert loads, every layer and their mean: 0 for equal loads. At the end the "
        f"least used expert of a layer had {format_percent(min(flat))} of its tokens, the most used "
        f"{format_percent(max(flat))}; equal loads would be {format_percent(1 / len(shares[layers[0]]))}. "
        f"Dropped assignments: at most {format_percent(dropped)}.",
        lines=[*lines, Line(name="mean", x=[float(step) for step in steps], y=means)],
        label=f"Gini coefficient of the expert loads against step, ending at {means[-1]:.3f}",
    )  # fmt: skip


def describe_loss_drop(drop: LossDrop) -> str:
    after = f" ({format_duration(drop.seconds)} into training)" if drop.seconds is not None else ""
    if drop.from_copy_loss:
        return (
            f"on repeated shuffled tokens the loss went from {drop.before:.2f} to {drop.after:.2f} nats per token until "
            f"step {drop.end_step:,}, and was halfway around step {drop.step:,}{after}. Only attention that copies the "
            "token after an earlier occurrence can lower it."
        )
    return (
        f"around step {drop.step:,}{after} the loss went from {drop.before:.2f} to {drop.after:.2f} nats a "
        "token in the steepest stretch of the run."
    )


def event_table(records: Records, section: str = "Training", title: str = "Events") -> Iterator[Table]:
    """Yield a table of the first failed steps, with the documents of their batches; nothing without one."""
    events = [record for record in records if "event" in record]
    if not events:
        return
    rows: list[list[Cell]] = []
    for event in events[:MAX_EVENTS]:
        found, total = json.loads(event["documents"]), int(event["n_documents"])
        lines = [f"{d['path']} ({d.get('id', d.get('offset'))})" for d in found]
        more = [f"and {total - len(lines)} more"] if total > len(lines) else []
        documents = Folded(text=f"{total:,}", lines=[*lines, *more]) if lines else "–"
        rows.append(
            [f"{event['step']:,}", f"{event['event']}: {event['message']}", event["action"], documents]
        )
    note = "Failed steps and warnings, the action taken, and the documents of the batch."
    if len(events) > MAX_EVENTS:
        note += f" And {len(events) - MAX_EVENTS:,} later ones; all are in the metrics of the run."
    names = [Column(name=name) for name in ("Event", "Action", "Documents")]
    yield Table(
        section=section, title=title, note=note, columns=[Column(name="Step", number=True), *names], rows=rows
    )  # fmt: skip


def parallel_blocks(measured: Mapping[str, Any], predicted: Mapping[str, Any]) -> Iterator[Block]:
    """Yield the section "Parallel": who holds what, the timeline of a step, predicted against measured.

    Args:
        measured: of a step. ranks: each {place, timeline: (share of waiting, axis) of its parts}; seconds;
            totals: of rank 0, "axis operation" -> (calls, sent bytes).
        predicted: by `plan.layout_cost`. holds: of each rank (blocks, rows of a step, parameters); seconds; totals.
    """
    section, ranks = "Parallel", measured["ranks"]
    names = ("Blocks", "Rows of a step", "Parameters")
    yield Table(
        section=section, title="Who holds what", note="Parameters between two steps, without copies for a use.",
        columns=[Column(name="Rank"), Column(name="Place"), *(Column(name=name, number=True) for name in names)],
        rows=[
            [str(n), rank["place"], *held] for n, (rank, held) in enumerate(zip(ranks, predicted["holds"], strict=True))
        ],
    )  # fmt: skip
    lines = [rank["timeline"] for rank in ranks]
    yield HeatMap(
        section=section, title="Timeline of a step",
        note=f"A row is a rank, a column 1/{len(lines[0])} of {format_duration(measured['seconds'])}. The number is the "
        "share of the time that the rank waits, the name the axis for which it waits most.",
        values=[[share or None for share, _ in line] for line in lines],
        signs=[[axis for _, axis in line] for line in lines],
    )  # fmt: skip
    rows: list[list[Cell]] = [
        ["step", *["–"] * 2, *(format_duration(s["seconds"]) for s in (predicted, measured))]
    ]
    for key in sorted(predicted["totals"].keys() | measured["totals"].keys()):
        both = [side["totals"].get(key, (0, 0)) for side in (predicted, measured)]
        rows.append([key, *(f"{calls:,}" for calls, _ in both), *(format_si(sent, "B") for _, sent in both)])
    headings = ("Calls, predicted", "Calls, counted", "Time or bytes, predicted", "Time or bytes, measured")
    yield Table(
        section=section, title="Predicted and measured", note="Calls and sent bytes of rank 0 in a step, by axis.",
        columns=[Column(name="Quantity"), *(Column(name=name, number=True) for name in headings)], rows=rows,
    )  # fmt: skip


# The plan and the network

# Only what may turn out differently: the plan fixes parameters, FLOPs, tokens and epochs, which its arithmetic lists.
_PLAN_ROWS = {
    "first_step_seconds": ("start of the run to the first training step", "s"),
    "seconds": ("training time", "s"),
    "tokens_per_second": ("speed", "tokens/s"),
    "mfu": ("MFU, of the measured peak", "share"),
    "memory_bytes": ("peak memory", "bytes"),
    "bits_per_byte": ("bits per byte, test files", "bits/byte"),
}


def plan_table(expected: Mapping[str, float], actual: Mapping[str, float | None] | None = None) -> Table:
    """Return planned quantities, and with `actual` their outcome; the page joins what several steps measured."""
    names = ["Quantity", "Planned", *(["Outcome", "Difference"] if actual is not None else [])]
    rows: list[list[Cell]] = []
    for key, (quantity, unit) in _PLAN_ROWS.items():
        planned, outcome = expected.get(key), (actual or {}).get(key)
        if key not in expected or (actual is not None and outcome is None):
            continue
        cells = [quantity, format_quantity(planned, unit)]
        if actual is not None:
            difference = f"{100 * (outcome / planned - 1):+.1f}{NBSP}%" if planned and outcome else "–"
            cells += [format_quantity(outcome, unit), difference.replace("-", "\N{MINUS SIGN}")]
        rows.append([*cells])
    columns = [Column(name=name, number=name != "Quantity") for name in names]
    return Table(section="Plan", title="Plan and outcome", columns=columns, rows=rows)


def plan_blocks(budget: str, expected: Mapping[str, float], arithmetic: Sequence[str]) -> list[Block]:
    """Return the section of the plan: its budget, its figures and the planner's arithmetic, line by line."""
    line = f"Budget: {budget}. The planner timed training steps on this machine and chose the configuration with the "
    line += "lowest expected held-out loss in that budget."
    lines = Text(section="Plan", title="The planner's arithmetic", lines=[*arithmetic], style="list")
    return [Text(section="Plan", lines=[line]), plan_table(expected), lines]


def _mixer_text(mixer: Mapping[str, Any]) -> str:
    if mixer["kind"] != "heads":
        return str(mixer["kind"])
    return f"{mixer['n_heads']} head{'s' * (mixer['n_heads'] > 1)} of {mixer['head_dim']}"


def model_facts(
    config: Mapping[str, Any], params: Mapping[str, int], checkpoints: Mapping[str, Any] | None = None
) -> Facts:
    """Return the shape of a network from its `config.json`, its parameters, and what its checkpoints took."""
    shape = config["transformer"]
    rows = {
        "parameters": f"{params['total']:,}",
        "layers": f"{shape['n_layers']}",
        "width": f"{shape['d_model']}",
        "vocabulary": f"{shape['vocab_size']:,}",
        "embedding and head": f"{params['embedding']:,}",
    }
    rows["mixers"] = ", ".join(sorted({_mixer_text(m) for m in shape["mixers"].values()}))
    if experts := shape.get("experts"):
        rows["experts"] = f"{experts['n_experts']}, {experts['top_k']} per token"
        rows["active parameters"] = f"{params['active']:,}"
    if shape.get("ngram"):
        rows["n-gram tables"] = f"{params['ngram']:,}"
    if checkpoints:
        rows["state in training"] = checkpoints["size_report"]
        rows["checkpoints"] = checkpoints["line"]
    return Facts(section="Model", rows=[*rows.items()])
