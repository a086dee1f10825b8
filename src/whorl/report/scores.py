"""The blocks of an evaluation: bits per byte against compressors, the table of its tasks, coloured samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from whorl.evals.figures import figure_notes, figure_rows
from whorl.evals.results import TaskResult
from whorl.report.blocks import (
    EMPTY,
    Bar,
    BarStyle,
    Block,
    Card,
    Cell,
    Column,
    Histogram,
    Sample,
    SampleToken,
    StepReport,
    Table,
    Text,
)
from whorl.report.format import format_number, format_percent, format_si
from whorl.report.stages import percent_card
from whorl.report.training import plan_table

_STYLES: dict[str, BarStyle] = {"model": "model", "ngram": "ngram", "compressor": "compressor"}
BITS_PER_BYTE_FIGURES = (
    "Bits per byte of one model differ by what is read: whole files of the test split (test), short rows of the validation "
    "split without the text before them (validation, in training), or the start of the test split (the stages after it)."
)
_SCORES = (
    "Bits that each method needs per byte of {files:,} files of the test split ({size}). Lower is better. The model and the "
    "n-gram model read each file separately. A compressor in one stream also adapts to the other held-out files; a primed "
    "one has read {primer} first. "
) + BITS_PER_BYTE_FIGURES
_TABLE_NOTE = (
    "Intervals are over items, with documents as clusters. Chance is the value of random answers. Figures of two models "
    "compare if their hashes are equal; whorl eval A --against B states the difference."
)


def evaluation_report(
    found: Mapping[str, Any], expected: Mapping[str, float], tasks: Sequence[TaskResult] = ()
) -> StepReport:
    """Return the report of an evaluation.

    Args:
        found: content of `evaluation.json`. expected: figures of the plan, if any. tasks: results, for the table.
    """
    ours = found["bits_per_byte"]
    rows = [("this model", "file by file", ours, "model")]
    for baseline in found.get("baselines", []):
        name, _, setting = baseline["name"].partition(", ")
        rows.append((name, setting, baseline["bits_per_byte"], baseline["kind"]))
    rows.sort(key=lambda row: row[2])
    columns = [
        Column(name="Method"), Column(name="Setting"), Column(name="Bits per byte", number=True),
        Column(name="Times the model", number=True, optional=True),
    ]  # fmt: skip
    bars = [
        Bar(
            cells=[name, setting, f"{bits:.3f}", f"{bits / ours:.2f}" if ours else "–"],
            value=bits,
            style=_STYLES.get(kind, ""),
        )
        for name, setting, bits, kind in rows
    ]
    part = found.get("baseline_train_fraction", 1.0)
    primer = (
        "the training split"
        if part == 1
        else f"{format_percent(part)} of the training files (the n-gram model, too)"
    )
    note = _SCORES.format(files=found["files"], size=format_si(found["bytes"], "B"), primer=primer)
    blocks: list[Block] = [*_nearest(found.get("completions")), *map(_sample, found.get("samples", []))]
    blocks.append(Histogram(section="Bits per byte", note=note, columns=columns, bars=bars))
    others = [row for row in rows if row[3] == "compressor" and row[2]]
    more = ""
    if others:
        name, setting, bits, _ = others[0]
        more = f"{format_number(ours / bits)} × the best compressor, {name} {setting}".rstrip()
    cards = [Card(label="Bits per byte, test files", value=f"{ours:.3f}", more=more, number=ours)]
    if (per_token := found.get("perplexity")) is not None:
        more = "per token of this tokenizer"
        cards.append(
            Card(label="Perplexity, test files", value=f"{per_token:.2f}", more=more, number=per_token)
        )
    if done := found.get("completions"):
        n, parsed = done["prompts"], done["parsed"]
        more = f"{parsed} of {n} functions"
        more += f"; {done['unfinished']} reached the length limit" if done["unfinished"] else ""
        cards.append(percent_card("Completions that parse", parsed / n, more))
    if tasks:
        blocks.append(task_table(tasks))
    if "bits_per_byte" in expected:
        blocks.append(plan_table(expected, {"bits_per_byte": ours}))
    return StepReport(summary=_summary(ours, others, found.get("completions")), cards=cards, blocks=blocks)


def task_table(tasks: Sequence[TaskResult]) -> Table:
    """Return the figures of tasks, for the end of the page."""
    columns = [
        Column(name="Task"), Column(name="Measures", optional=True), Column(name="Value", number=True),
        Column(name="95 % interval", number=True), Column(name="Chance", number=True), Column(name="Items", number=True),
        Column(name="Hash", optional=True, code=True),
    ]  # fmt: skip
    rows: list[list[Cell]] = []
    for task in tasks:
        for _, metric, value, interval, chance, n, _ in figure_rows([task]):
            cells = [f"{task.task}: {metric}", task.about, value, interval, chance, n, task.hash]
            rows.append([cell or EMPTY for cell in cells])
    return Table(
        section="Evaluation", title=tasks[0].model, at_end=True, columns=columns, rows=rows,
        note=" ".join([_TABLE_NOTE, *figure_notes(tasks)]),
    )  # fmt: skip


def _summary(
    ours: float, others: Sequence[tuple[str, str, float, str]], done: Mapping[str, Any] | None
) -> str:
    """Return what the figures mean: the comparison with the best compressor, and the completions that parse."""
    text = f"The model compresses text that it has not seen to {ours:.3f} bits per byte; plain text has 8."
    if others and ours:
        name, setting, bits, _ = others[0]
        better = "better" if ours < bits else "worse"
        text += (
            f" That is {better} than the best compressor tried, {name} {setting}".rstrip()
            + f", with {bits:.3f}."
        )
    if done:
        text += f" Of {done['prompts']} functions that it completed, Python can parse {done['parsed']}; "
        text += "whether they do what their name says was not tested."
    return text


def _nearest(done: Mapping[str, Any] | None) -> Iterator[Text]:
    """Yield the best completion of a held-out function, if any parses."""
    if done and done.get("nearest"):
        title = f"Of {done['prompts']} completed functions, the one nearest to the real code"
        yield Text(section="Samples", title=title, lines=done["nearest"].split("\n"), style="code")


def _sample(sample: Mapping[str, Any]) -> Sample:
    tokens = [
        SampleToken.of_bytes(
            bytes.fromhex(token["hex"]),
            min(1.0, token["probability"]),
            [(bytes.fromhex(other), min(1.0, p)) for other, p in token["alternatives"]],
        )
        for token in sample["tokens"]
    ]
    return Sample(section="Samples", note=sample["note"], prompt=sample["prompt"], tokens=tokens)
