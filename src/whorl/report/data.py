"""Everything a report may say, as one typed record that the steps fill in.

The report draws; it measures nothing and opens no artifact. So whoever wires a run hands over plain
numbers, and the page can be rendered from a test, a notebook or an interrupted run alike. Every section is
optional: what is missing is named on the page with the step that would have made it, so that a report
half-way is still honest.

Units stand in the names: seconds, bytes, bits per byte (of UTF-8 text), nats for the training loss a
token.
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
    """What is left of the corpus after a stage: "found", "read", "without too-long", ..., "train"."""

    stage: str
    documents: Count
    bytes: Count


class CorpusSection(_ReportModel):
    """From what was found to what was trained on.

    `quarantine` and `dropped`: reason -> documents; `splits`: name -> (documents, bytes).
    """

    sources: list[str] = []
    funnel: list[FunnelStage]
    quarantine: dict[str, Count] = {}
    dropped: dict[str, Count] = {}
    splits: dict[str, tuple[Count, Count]] = {}


class Domain(_ReportModel):
    """How well the tokenizer compresses one kind of text."""

    domain: str
    bytes: Count
    tokens: Count


class TokenizerSection(_ReportModel):
    vocab_size: Count
    domains: list[Domain] = []
    seconds: Positive | None = None


class ModelSection(_ReportModel):
    """The network; `shape` is label -> value as people read them, e.g. {"layers": "4"}."""

    name: str
    parameters: Count
    shape: dict[str, str] = {}


class PlanRow(_ReportModel):
    """One quantity as planned and as it turned out (None: not known)."""

    quantity: str
    planned: Finite | None = None
    actual: Finite | None = None
    unit: Literal[
        "", "s", "bytes", "tokens", "tokens/s", "FLOP", "FLOP/s", "parameters", "bits/byte", "share"
    ] = ""


class PlanSection(_ReportModel):
    """`arithmetic` holds the planner's own lines (what, with numbers, and the source), in order."""

    budget: str
    rows: list[PlanRow] = []
    arithmetic: list[str] = []


class CurvePoint(_ReportModel):
    """One training step. `loss` in nats a token; `seconds` since training began."""

    step: Count
    loss: Finite
    learning_rate: Positive | None = None
    seconds: Positive | None = None
    tokens: Count | None = None


class HeldOutPoint(_ReportModel):
    step: Count
    bits_per_byte: Positive


class InductionPoint(_ReportModel):
    """Loss on the second half of rows that repeat shuffled tokens: nats a token, low once copying is learnt."""

    step: Count
    nll: Positive


class GiniPoint(_ReportModel):
    """How unevenly a layer's experts were used: the Gini coefficient of their loads, 0 when all had the same."""

    step: Count
    gini: Probability


class ExpertUsage(_ReportModel):
    """One layer of experts. shares: of all assignments, by expert, at the end; dropped: the largest share of assignments
    that found no place."""

    layer: Count
    gini_points: list[GiniPoint]
    load_fractions: list[Probability]
    dropped_fraction: Probability


class TrainingEvent(_ReportModel):
    """Something that went wrong at a step, and what was done. documents: some of those in its batch, of `n_documents`."""

    step: Count
    kind: str
    message: str
    action: str
    documents: list[str] = []
    n_documents: Count = 0


class TrainingSection(_ReportModel):
    """The curves. The mark of the fall is found from `points` (see `fall`), so it is not handed over."""

    points: list[CurvePoint]
    held_out: list[HeldOutPoint] = []
    induction: list[InductionPoint] = []
    experts: list[ExpertUsage] = []
    events: list[TrainingEvent] = []
    tokens_per_second: Positive | None = None
    mfu: Probability | None = None
    peak_memory_bytes: Count | None = None


class Score(_ReportModel):
    """Bits per byte of the held-out files under one method; `kind` gives the bar its colour."""

    name: str
    setting: str = ""
    bits_per_byte: Positive
    kind: Literal["model", "ngram", "compressor"] = "compressor"


class ScoresSection(_ReportModel):
    """`files` held-out files of `bytes` bytes in all."""

    files: Count
    bytes: Count
    scores: list[Score]


class CompletionsSection(_ReportModel):
    """How many completions of held-out functions parse, beside the real code under the same rule."""

    prompts: Annotated[int, Field(ge=1)]
    parsed: Count
    unfinished: Count = 0
    real_parsed: Count


class SampleToken(_ReportModel):
    """One token of a sample with the probability the model gave it, and what else it considered."""

    text: str
    probability: Probability
    alternatives: list[tuple[str, Probability]] = []

    @classmethod
    def of_bytes(
        cls, token: bytes, probability: float, alternatives: Sequence[tuple[bytes, float]] = ()
    ) -> SampleToken:
        """From token bytes, which need not be whole characters."""
        pairs = [(printable_token(other), p) for other, p in alternatives]
        return cls(text=printable_token(token), probability=probability, alternatives=pairs)


class TextSample(_ReportModel):
    """A prompt and what the model wrote after it; `note` says how it was sampled."""

    prompt: str
    tokens: list[SampleToken]
    note: str = ""


class BeforeAfter(_ReportModel):
    """A figure before a stage and after it."""

    before: Positive
    after: Positive


class StagePoint(_ReportModel):
    """One step of a stage.

    loss: as the stage's `loss_is` has it; passed: share of the answers sampled in the step; length: mean of theirs,
    length_wrong: of the wrong ones, in tokens.
    """

    step: Count
    loss: Finite | None = None
    accuracy: Probability | None = None
    completion_length: Positive | None = None
    completion_length_incorrect: Positive | None = None


class TaskCompletion(_ReportModel):
    """What a model said to a task, and what the verifier said of it."""

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
    """A stage after pretraining: it takes a model and leaves a model.

    tested: held-out tasks, of which the shares passed are told, with answers sampled and with the likeliest tokens.
    loss_is: what the points' loss is, in words.
    """

    name: str
    trained_on: str = ""
    n_test_tasks: Count | None = None
    accuracy: BeforeAfter | None = None
    accuracy_greedy: BeforeAfter | None = None
    bits_per_byte: BeforeAfter | None = None
    seconds: Positive | None = None
    loss_description: str = "Nats a token that was to be learnt"
    points: list[StagePoint] = []
    samples: list[TaskComparison] = []


class StepTime(_ReportModel):
    """One step of the recipe; `looked_up` when a former run had made it already (its time is that run's)."""

    step: str
    seconds: Positive
    cached: bool = False
    bytes: Count | None = None
    note: str = ""


class TimeSection(_ReportModel):
    """`cost_per_hour` with its `currency` turns hours into money; leave it out on a machine that is yours."""

    steps: list[StepTime]
    budget_seconds: Positive | None = None
    cost_per_hour: Positive | None = None
    currency: str = "USD"


class LineageNode(BaseModel):
    """What `Store.lineage` returns; fields that the page does not show are passed over."""

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
    """The whole page. `created` is shown as it is; `next_commands` are for the reader to type; `absent` are sections (by the
    name of their link) for which the recipe has no step, and of which the page therefore says nothing."""

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
    """A token's bytes as text; bytes that are no whole character stand as <e2>."""
    try:
        return token.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(byte) if byte < 0x80 else f"<{byte:02x}>" for byte in token)
