"""The events of a served model, and the topics that hold them.

    topic         key                     type
    completions   id of the completion    completion.made       prompt and answer, with token ids, if the user consented
    feedback      actor                   feedback.given        like, dislike, none, edit, better, tie
                                          actor.erased          all of this actor's feedback is void
    quarantine    place of the record     record.rejected       what a view could not read, and why

Feedback is keyed by its actor: the clicks of one person keep their order, and a popular completion is spread over all
partitions. The text that a person wrote (`prompt`, `prompt_ids`, `choices`, `text` of an edit) is sealed with a key of the
actor (`actor_keys.py`), so that `whorl forget` makes it unreadable without changing the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from whorl.errors import DataError, one_of, shorten
from whorl.log.event import Event, Schema
from whorl.log.port import Log, TopicConfig

COMPLETIONS, FEEDBACK, QUARANTINE = "completions", "feedback", "quarantine"
TOPICS = {
    COMPLETIONS: TopicConfig(max_record_bytes=4 << 20),
    FEEDBACK: TopicConfig(),
    QUARANTINE: TopicConfig(partitions=1),
}
_TYPES = (
    "completion.made",
    "feedback.given",
    "actor.erased",
    "record.rejected",
    "row.changed",
    "capture.heartbeat",
)
SCHEMAS = {kind: Schema() for kind in _TYPES}
FeedbackKind = Literal["like", "dislike", "none", "edit", "better", "tie"]
FEEDBACK_KINDS: tuple[str, ...] = get_args(FeedbackKind)


@dataclass(frozen=True)
class LoggedAnswer:
    """One answer. ids: its tokens, with the end if there was one. finish: as in the API.

    forced: how many of the first ids repeat the end of the prompt (token healing); `text` is without them.
    """

    text: str
    ids: list[int]
    finish: str = "stop"
    forced: int = 0


@dataclass(frozen=True)
class CompletionMade:
    """A completion that its user lets us keep.

    Attributes:
        id: of the API's answer. model: name in the API. digest: of the artifact, for lineage.
        prompt: text, or messages of a conversation. prompt_ids: its tokens as the model saw them; with token healing without
            the end of the text, which each answer begins with.
        settings: of sampling. pair: shared by the two answers of a blind comparison. side: "left" or "right" of it.
        arm: "champion" or "challenger" of a gate, else "".
    """

    id: str
    model: str
    digest: str
    actor: str
    prompt: str | list[dict[str, Any]]
    prompt_ids: list[int]
    choices: list[LoggedAnswer]
    settings: dict[str, Any] = field(default_factory=dict)
    pair: str = ""
    side: str = ""
    arm: str = ""

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> CompletionMade:
        """Read the opened data of an event."""
        return cls(**{**data, "choices": [LoggedAnswer(**choice) for choice in data["choices"]]})

    def event(self, time: float) -> Event:
        """Return the event; seal it before it is appended (`ActorKeys.seal`)."""
        return Event("completion.made", self.id, asdict(self), id=self.id, time=time)


@dataclass(frozen=True)
class FeedbackGiven:
    """A click.

    Attributes:
        completion, choice: which answer. kind: "none" takes a like or dislike back.
        text: of an edit. over: the completion that this one is better than, or ties with. over_choice: which of its answers.
        via: "page", "api" or "simulated".
    """

    actor: str
    completion: str
    kind: FeedbackKind
    choice: int = 0
    text: str = ""
    over: str = ""
    over_choice: int = 0
    via: str = "api"

    def __post_init__(self) -> None:
        if self.kind not in FEEDBACK_KINDS:
            raise DataError(f"feedback {shorten(self.kind)!r}", expected=one_of(self.kind, FEEDBACK_KINDS))

    @property
    def answer(self) -> str:
        """The answer as a key of counts: COMPLETION/CHOICE."""
        return f"{self.completion}/{self.choice}"

    def event(self, id: str, time: float) -> Event:
        """Return the event. id: of the click; every attempt to send it has the same one."""
        return Event("feedback.given", self.actor, asdict(self), id=id, time=time)


def create_topics(log: Log) -> None:
    """Create the topics of this module, unless they exist."""
    for name, config in TOPICS.items():
        log.create(name, config if name not in log.topics() else None)
