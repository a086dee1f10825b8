"""The content of a report as one typed record.

The report draws and measures nothing; it opens no artifact. Steps pass plain numbers, so the page can be rendered from a
test, a notebook or an interrupted run. Every section is optional. A missing section names the step that makes it.

Units are part of the names: seconds, bytes, bits per byte (of UTF-8 text). Training losses are nats per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Unit = Literal["", "s", "bytes", "tokens", "tokens/s", "FLOP", "FLOP/s", "parameters", "bits/byte", "share"]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _ReportModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FunnelStage(_ReportModel):
    """Documents and bytes left after one stage of curation: "found", "read", "without too-long", ..., "train"."""

    stage: str
    documents: Count
    bytes: Count


class CorpusSection(_ReportModel):
    """The corpus, from the files found to the training split.

    quarantine, dropped: reason -> documents. splits: name -> (documents, bytes).
    """

    sources: list[str] = []
    funnel: list[FunnelStage]
    quarantine: dict[str, Count] = {}
    dropped: dict[str, Count] = {}
    splits: dict[str, tuple[Count, Count]] = {}


class Domain(_ReportModel):
    """Compression of one kind of text by the tokenizer."""

    domain: str
    bytes: Count
    tokens: Count


class TokenizerSection(_ReportModel):
    vocab_size: Count
    domains: list[Domain] = []
    seconds: Positive | None = None


class ModelSection(_ReportModel):
    """The network; `shape` maps label -> value as displayed, e.g. {"layers": "4"}."""

    name: str
    parameters: Count
    shape: dict[str, str] = {}


class PlanRow(_ReportModel):
    """One quantity, planned and measured; None if unknown."""

    quantity: str
    planned: Finite | None = None
    actual: Finite | None = None
    unit: Literal[
        "", "s", "bytes", "tokens", "tokens/s", "FLOP", "FLOP/s", "parameters", "bits/byte", "share"
    ] = ""


class PlanSection(_ReportModel):
    """The plan against the outcome; `arithmetic` holds the planner's lines in order."""

    budget: str
    rows: list[PlanRow] = []
    arithmetic: list[str] = []


class CurvePoint(_ReportModel):
    """One training step: `loss` in nats per token, `seconds` since the start of training."""

    step: Count
    loss: Finite
    learning_rate: Positive | None = None
    seconds: Positive | None = None
    tokens: Count | None = None


class HeldOutPoint(_ReportModel):
    step: Count
    bits_per_byte: Positive


class InductionPoint(_ReportModel):
    """Loss on the second half of rows that repeat shuffled tokens, in nats per token; low once induction heads exist."""

    step: Count
    nll: Positive


class GiniPoint(_ReportModel):
    """Gini coefficient of the expert loads of a layer; 0 for equal loads."""

    step: Count
    gini: Probability


class ExpertUsage(_ReportModel):
    """One layer of experts.

    load_fractions: share of all assignments by expert, at the end.
    dropped_fraction: largest share of assignments dropped by the capacity limit.
    """

    layer: Count
    gini_points: list[GiniPoint]
    load_fractions: list[Probability]
    dropped_fraction: Probability


class TrainingEvent(_ReportModel):
    """A failure at a step and the action taken; `documents` lists some of the `n_documents` in the batch."""

    step: Count
    kind: str
    message: str
    action: str
    documents: list[str] = []
    n_documents: Count = 0


class StageObjective(_ReportModel):
    """The objective that a stage minimized, as in `objectives/catalog.py`."""

    name: str
    formula: str
    paper: str


class TrainingSection(_ReportModel):
    """The training curves. The onset of induction is computed from them (`induction_onset.py`)."""

    objective: StageObjective | None = None
    points: list[CurvePoint]
    held_out: list[HeldOutPoint] = []
    induction: list[InductionPoint] = []
    experts: list[ExpertUsage] = []
    events: list[TrainingEvent] = []
    tokens_per_second: Positive | None = None
    mfu: Probability | None = None
    peak_memory_bytes: Count | None = None


class Score(_ReportModel):
    """Bits per byte of the held-out files under one method; `kind` selects the colour of the bar."""

    name: str
    setting: str = ""
    bits_per_byte: Positive
    kind: Literal["model", "ngram", "compressor"] = "compressor"


class ScoresSection(_ReportModel):
    """Scores of all methods on `files` held-out files with `bytes` bytes in total."""

    files: Count
    bytes: Count
    scores: list[Score]


class CompletionsSection(_ReportModel):
    """Share of completed held-out functions that parse, and the same share for the real code."""

    prompts: Annotated[int, Field(ge=1)]
    parsed: Count
    unfinished: Count = 0
    real_parsed: Count


class SampleToken(_ReportModel):
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


class TextSample(_ReportModel):
    """A prompt and its completion; `note` holds the sampling parameters."""

    prompt: str
    tokens: list[SampleToken]
    note: str = ""


class BeforeAfter(_ReportModel):
    """A value before a stage and after it."""

    before: Positive
    after: Positive


class StagePoint(_ReportModel):
    """One step of a stage.

    loss: as described by the stage's `loss_description`.
    accuracy: share of the sampled completions that passed.
    completion_length, completion_length_incorrect: mean tokens of all and of the failed completions.
    """

    step: Count
    loss: Finite | None = None
    accuracy: Probability | None = None
    completion_length: Positive | None = None
    completion_length_incorrect: Positive | None = None


class TaskCompletion(_ReportModel):
    """A completion of a task with its verdict."""

    text: str
    passed: bool
    reward: Finite = 0.0
    reason: str = ""


class TaskComparison(_ReportModel):
    """One held-out task, answered before a stage and after it."""

    prompt: str
    before: TaskCompletion
    after: TaskCompletion


class StageSection(_ReportModel):
    """A stage after pretraining; it takes a model and leaves a model.

    n_test_tasks: held-out tasks behind `accuracy` (sampled) and `accuracy_greedy`.
    loss_description: name and unit of the loss in `points`.
    """

    name: str
    trained_on: str = ""
    n_test_tasks: Count | None = None
    accuracy: BeforeAfter | None = None
    accuracy_greedy: BeforeAfter | None = None
    bits_per_byte: BeforeAfter | None = None
    seconds: Positive | None = None
    objective: StageObjective | None = None
    loss_description: str = "Loss in nats per trained token"
    points: list[StagePoint] = []
    samples: list[TaskComparison] = []


class StepTime(_ReportModel):
    """One step of the recipe. `cached`: an earlier run made the artifact; the time is that of the earlier run."""

    step: str
    seconds: Positive
    cached: bool = False
    bytes: Count | None = None
    note: str = ""


class TimeSection(_ReportModel):
    """Time per step; `cost_per_hour` and `currency` add a cost column."""

    steps: list[StepTime]
    budget_seconds: Positive | None = None
    cost_per_hour: Positive | None = None
    currency: str = "USD"


class LineageNode(BaseModel):
    """A node of `Store.lineage`; fields that the page does not show are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    address: str
    kind: str = ""
    name: str = ""
    seconds: Positive | None = None
    bytes: Count | None = None
    missing: bool = False
    config: dict[str, Any] = {}
    parents: dict[str, LineageNode] = {}


class ReportData(_ReportModel):
    """The content of the whole page.

    next_commands: shell commands shown at the end.
    omitted_sections: ids of the sections for which the recipe has no step; the page leaves them out.
    """

    title: str = "A small language model"
    about: str = ""
    run: str = ""
    created: str = ""
    corpus: CorpusSection | None = None
    tokenizer: TokenizerSection | None = None
    model: ModelSection | None = None
    plan: PlanSection | None = None
    training: TrainingSection | None = None
    scores: ScoresSection | None = None
    completions: CompletionsSection | None = None
    samples: list[TextSample] = []
    stages: list[StageSection] = []
    time: TimeSection | None = None
    lineage: LineageNode | None = None
    environment: dict[str, str] = {}
    next_commands: list[str] = []
    omitted_sections: list[str] = []


def printable_token(token: bytes) -> str:
    """Return the text of a token; bytes of an incomplete character are written as <e2>."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"<{byte:02x}>" for byte in token)
