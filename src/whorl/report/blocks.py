"""The typed blocks of which a report consists; a step writes them as `report.json` into its artifact.

    ctx.report.blocks.append(Curve(section="Probe", title="Loss", lines=[Line(name="loss", x=[1, 2], y=[3.0, 2.5])]))

The report draws blocks and has no code for particular steps. Blocks of one section are shown together, also of several
steps. Tables with the same section and title are joined: rows with an equal first cell become one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from whorl.errors import CorruptArtifactError

REPORT_FILE = "report.json"
EMPTY = "–"

Probability = Annotated[float, Field(ge=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Block(_Record):
    """The fields of every block.

    section: heading of its section; by default the name of the step.
    title: heading of the block; note: a sentence below it.
    at_end: its section follows all others.
    """

    section: str = ""
    title: str = ""
    note: str = ""
    at_end: bool = False


LineStyle = Literal["main", "faint", "second", "third", "fourth", "fifth", "sixth"]


class Line(_Record):
    """One line of a curve, in the order of x. low, high: ends of an interval around each y, drawn as a band.

    style: selects the colour. A chart with another style than "main" and "faint" gets a legend. joined: draw the line, too.
    """

    name: str
    x: list[Finite] = Field(min_length=1)
    y: list[Finite] = Field(min_length=1)
    low: list[Finite] = []
    high: list[Finite] = []
    style: LineStyle = "main"
    dots: bool = False
    joined: bool = True


class Curve(_Block):
    """Lines over a common axis.

    label: text alternative of the picture. mark: a vertical line (x, label). unit: of the values in the tooltip.
    x_range, y_range: lowest and highest value shown; by default all values fit.
    """

    kind: Literal["curve"] = "curve"
    lines: list[Line] = Field(min_length=1)
    label: str = ""
    x_label: str = "step"
    height: int = Field(default=220, ge=60, le=1000)
    x_range: tuple[Finite, Finite] | None = None
    y_range: tuple[Finite, Finite] | None = None
    unit: Literal["", "share"] = ""
    mark: tuple[Finite, str] | None = None


class HeatMap(_Block):
    """Cells with a value and a sign (e.g. the best action in each cell of a grid); colours grow with the value.

    values: [rows][columns], None for a cell without a value. signs: of the same shape.
    """

    kind: Literal["heatmap"] = "heatmap"
    values: list[list[Finite | None]] = Field(min_length=1)
    signs: list[list[str]]


class Image(_Block):
    """A picture. data: the file in base64. alt: text alternative."""

    kind: Literal["image"] = "image"
    media_type: Literal["image/gif", "image/png"]
    data: str = Field(pattern=r"^[A-Za-z0-9+/=]+$")
    alt: str


class Change(_Record):
    """A cell with a value before and after a step, both as displayed."""

    before: str
    after: str
    note: str = ""


class Folded(_Record):
    """A cell with a short text that opens into lines."""

    text: str
    lines: list[str]


class Column(_Record):
    """number: aligned to the right. optional: left out on narrow screens. code: set in the code font."""

    name: str
    number: bool = False
    optional: bool = False
    code: bool = False


Cell = str | Change | Folded


class Table(_Block):
    """Rows of cells as displayed; the first cell names the row."""

    kind: Literal["table"] = "table"
    columns: list[Column] = Field(min_length=1)
    rows: list[list[Cell]]


BarStyle = Literal["", "main", "model", "ngram", "compressor"]


class Bar(_Record):
    """One row of a histogram: its cells and the length of its bar; `style` selects the colour."""

    cells: list[str]
    value: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    style: BarStyle = ""


class Histogram(_Block):
    """A table with a bar in each row; bars are relative to the longest."""

    kind: Literal["histogram"] = "histogram"
    columns: list[Column]
    bars: list[Bar]


class Text(_Block):
    """Paragraphs; `style` "code" keeps spaces and line ends, "list" numbers the lines, folded until opened."""

    kind: Literal["text"] = "text"
    lines: list[str]
    style: Literal["prose", "code", "list"] = "prose"


class Facts(_Block):
    """Names and values side by side."""

    kind: Literal["facts"] = "facts"
    rows: list[tuple[str, str]]


class SampleToken(_Record):
    """One sampled token, its probability and the likeliest alternatives."""

    text: str
    probability: Probability
    alternatives: list[tuple[str, Probability]] = []

    @classmethod
    def of_bytes(
        cls, token: bytes, probability: float, alternatives: Sequence[tuple[bytes, float]] = ()
    ) -> SampleToken:
        """Make a token from bytes, which may be an incomplete character."""
        pairs = [(printable_token(other), p) for other, p in alternatives]
        return cls(text=printable_token(token), probability=probability, alternatives=pairs)


class Sample(_Block):
    """A prompt and its completion, coloured by the surprise of each token."""

    kind: Literal["sample"] = "sample"
    prompt: str
    tokens: list[SampleToken]


class Answer(_Record):
    """An answer to a task with its verdict; None: it has none."""

    text: str
    passed: bool | None
    reward: Finite = 0.0
    reason: str = ""


class Answers(_Block):
    """One task, answered before a step and after it."""

    kind: Literal["answers"] = "answers"
    prompt: str
    before: Answer
    after: Answer


class Card(_Record):
    """A headline figure on top of the page; of cards with one label the youngest is shown.

    number: a result in the shown unit, for means over seeds and lists of runs; None: a size, a time or a speed.
    """

    label: str
    value: str
    unit: str = ""
    more: str = ""
    number: Annotated[float | None, BeforeValidator(lambda x: x if x is None or isfinite(x) else None)] = None


Block = Annotated[
    Curve | HeatMap | Image | Table | Histogram | Text | Facts | Sample | Answers, Field(discriminator="kind")
]


class StepReport(BaseModel):
    """The part of a report that one step writes. summary: a sentence for the top of the page."""

    model_config = ConfigDict(extra="forbid")

    summary: str = ""
    cards: list[Card] = []
    blocks: list[Block] = []

    def write(self, folder: Path) -> None:
        """Write `report.json`, unless there is nothing to report or the step has written it itself."""
        if (self.cards or self.blocks) and not (folder / REPORT_FILE).exists():
            (folder / REPORT_FILE).write_text(self.model_dump_json(exclude_defaults=False) + "\n")

    @classmethod
    def read(cls, path: Path) -> StepReport:
        """Read a `report.json`. Raises CorruptArtifactError with the field that is not a block's."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise CorruptArtifactError(
                f"{path}: not a list of report blocks; {where}: {first['msg']}",
                expected="the blocks of whorl.report.blocks",
            ) from error


def sections(reports: Iterable[tuple[str, StepReport]]) -> dict[str, list[Any]]:
    """Return heading -> blocks, with the sections of the youngest step first, and those of `at_end` last.

    Args:
        reports: (name of the step, its report), in the order of their making.
    """
    found: dict[str, list[Any]] = {}
    starts: dict[str, tuple[bool, int, int]] = {}
    for age, (name, report) in enumerate(reports):
        for place, block in enumerate(report.blocks):
            heading = block.section or name
            starts.setdefault(heading, (block.at_end, -age, place))
            blocks = found.setdefault(heading, [])
            same = next((i for i, other in enumerate(blocks) if _is_table(other, block.title)), None)
            if isinstance(block, Table) and same is not None:
                blocks[same] = join_tables(blocks[same], block)
            else:
                blocks.append(block)
    return {heading: [*map(_shown, found[heading])] for heading in sorted(found, key=starts.__getitem__)}


def _shown(block: Any) -> Any:
    """Return a block without the columns that are empty in every row."""
    if not isinstance(block, Table):
        return block
    kept = [i for i in range(len(block.columns)) if i == 0 or any(row[i] != EMPTY for row in block.rows)]
    rows = [[row[i] for i in kept] for row in block.rows]
    return block.model_copy(update={"columns": [block.columns[i] for i in kept], "rows": rows})


def _is_table(block: Any, title: str) -> bool:
    return isinstance(block, Table) and block.title == title


def join_tables(one: Table, other: Table) -> Table:
    """Return the outer join on the first column: columns in the order of `one`, then new ones of `other`.

    A cell of `other` replaces an empty cell of `one` only.
    """
    columns = {column.name: column for column in (*one.columns, *other.columns)}
    rows: dict[Any, dict[str, Cell]] = {}
    for table in (one, other):
        for cells in table.rows:
            key = cells[0] if isinstance(cells[0], str) else cells[0].model_dump_json()
            row = rows.setdefault(key, {})
            for column, cell in zip(table.columns, cells, strict=True):
                if row.get(column.name, EMPTY) == EMPTY:
                    row[column.name] = cell
    joined = [[row.get(name, EMPTY) for name in columns] for row in rows.values()]
    return one.model_copy(
        update={"columns": [*columns.values()], "rows": joined, "note": one.note or other.note}
    )


def printable_token(token: bytes) -> str:
    """Return the text of a token; bytes of an incomplete character are written as <e2>."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"<{byte:02x}>" for byte in token)
