"""Record formats of conversations, preferences and labelled completions, converted to one type each.

    Conversation          messages                               SFT: every assistant turn
    PromptCompletion      prompt, completion (strings)           SFT of a model without a chat template
    Preference            prompt; chosen, rejected               DPO and related objectives, reward models
    UnpairedPreference    prompt; completion, label              KTO

A record is a mapping from JSON or Parquet. Conversations come as `messages` (role, content), as ShareGPT's
`conversations` (from, value), as Alpaca's instruction / input / output, or as prompt / completion. Preferences come
with a prompt and two completions, as strings or as messages. Either completion may repeat the prompt or include it.
These are the formats of TRL's page "dataset formats". Next to messages a record may have `tools` (JSON schemas) and
`chat_template_kwargs`, which the chat template renders.

The subtle point is a pair without a prompt. For messages the prompt is the shared turns. For strings it is the longest
common prefix. That may end inside a word ("bl" of blue and black), where no tokenizer would split. So it is cut at
the end of the last "Assistant:" or, without one, of the last whole word.

Nothing is repaired by guessing: a record without a known format raises `BadRecordError` with the faulty field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.data.forms import unknown_form
from whorl.data.quarantine import BadRecordError
from whorl.data.record_fields import (
    Messages,
    check_turns,
    has_field,
    messages_of,
    source_and_id,
    template_fields,
    text_field,
    type_name,
)
from whorl.errors import DataError

TextOrMessages = str | Messages  # a string to continue and its continuation, or a conversation and its answer

ASSISTANT_MARKER = "\n\nAssistant:"


@dataclass(frozen=True)
class Conversation:
    """Messages (role, content, optional tool_calls ...), at least one from the assistant, with source and id.

    tools, chat_template_kwargs: what the chat template renders in addition to the messages, as in an API request.
    """

    messages: Messages
    source: str = ""
    id: str = ""
    tools: Messages = ()
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PromptCompletion:
    """A string and its continuation."""

    prompt: str
    completion: str
    source: str = ""
    id: str = ""


@dataclass(frozen=True)
class Preference:
    """Two completions of one prompt, `chosen` preferred. All three are strings, or all three are messages.

    prompt_ids, chosen_ids, rejected_ids: token ids as a model saw or sampled them; used in place of the texts.

    Raises:
        DataError: the completions are equal, or strings and messages are mixed.
    """

    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    source: str = ""
    id: str = ""
    tools: Messages = ()  # as of a `Conversation`
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    chosen_ids: Sequence[int] = ()
    rejected_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        if len({isinstance(part, str) for part in (self.prompt, self.chosen, self.rejected)}) > 1:
            raise DataError(f"preference {self.id!r} mixes texts and messages", expected="one or the other")
        if self.chosen == self.rejected:
            raise DataError(
                f"preference {self.id!r}: chosen and rejected are identical",
                expected="two different answers",
                do="leave the pair out",
            )


@dataclass(frozen=True)
class UnpairedPreference:
    """A completion of a prompt, and whether it is good. Both are strings, or both are messages. Ids as of a `Preference`."""

    prompt: TextOrMessages
    completion: TextOrMessages
    label: bool
    source: str = ""
    id: str = ""
    tools: Messages = ()  # as of a `Conversation`
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()


def to_conversation(record: Mapping[str, Any]) -> Conversation:
    """Convert a record in one of the four formats. Raises BadRecordError."""
    if has_field(record, "messages"):
        messages = messages_of(record["messages"], "messages")
        check_turns(messages, "messages")
    elif has_field(record, "conversations"):
        messages = messages_of(record["conversations"], "conversations")
        check_turns(messages, "conversations")
        if isinstance(record.get("system"), str) and record["system"].strip():
            messages = ({"role": "system", "content": record["system"]}, *messages)
    elif has_field(record, "instruction") and has_field(record, "output"):
        question = text_field(record, "instruction")
        extra = record.get("input") or ""
        if not isinstance(extra, str):
            raise BadRecordError("bad_field", "input", f"is {type_name(extra)}, not a text")
        answer = text_field(record, "output")
        messages = _one_message(
            "user", f"{question}\n\n{extra}" if extra.strip() else question
        ) + _one_message("assistant", answer)
    elif has_field(record, "prompt") and has_field(record, "completion"):
        asked = _as_messages(record, "prompt", "user")
        messages = asked + _as_messages(record, "completion", "assistant")
        check_turns(asked, "prompt")
        check_turns(messages, "completion", len(asked))
    else:
        raise unknown_form(record, "conversations")
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRecordError("no_answer", "", f"{len(messages)} messages, none from the assistant")
    return Conversation(messages, *source_and_id(record), **template_fields(record))


def to_prompt_completion(record: Mapping[str, Any]) -> PromptCompletion:
    """Convert a record with the strings `prompt` (may be empty) and `completion`. Raises BadRecordError."""
    if not has_field(record, "completion"):
        raise unknown_form(record, "pairs")
    prompt = record.get("prompt") or ""
    if not isinstance(prompt, str):
        raise BadRecordError("bad_field", "prompt", f"is {type_name(prompt)}, not a text")
    template_fields(record, is_text=True)
    return PromptCompletion(prompt, text_field(record, "completion"), *source_and_id(record))


def to_preference(record: Mapping[str, Any]) -> Preference:
    """Convert a record with `chosen` and `rejected`, and `prompt` unless they include it. Raises BadRecordError."""
    if not (has_field(record, "chosen") and has_field(record, "rejected")):
        raise unknown_form(record, "preferences")
    texts = all(isinstance(record[k], str) for k in ("chosen", "rejected"))
    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    if texts and isinstance(record.get("prompt", ""), str | None):
        chosen, rejected = text_field(record, "chosen"), text_field(record, "rejected")
        _check_different(chosen, rejected)
        if has_field(record, "prompt"):
            prompt = text_field(record, "prompt")
            if chosen.startswith(prompt) and rejected.startswith(prompt):
                chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
        else:
            prompt = _common_prompt(chosen, rejected)
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        sides = [_as_messages(record, k, "assistant") for k in ("chosen", "rejected")]
        _check_different(*sides)
        shared = 0
        while shared < min(map(len, sides)) and sides[0][shared] == sides[1][shared]:
            shared += 1
        if has_field(record, "prompt"):
            prompt = _as_messages(record, "prompt", "user")
            repeated = prompt == sides[0][: len(prompt)] == sides[1][: len(prompt)]
            # The completions may have a system turn before the prompt text. Then they define the prompt.
            repeated_text = isinstance(record["prompt"], str) and prompt[0] in sides[0][:shared]
            if repeated or repeated_text:
                prompt = sides[0][:shared]
                sides = [side[shared:] for side in sides]
        else:
            prompt = sides[0][:shared]
            sides = [side[shared:] for side in sides]
        chosen, rejected = sides
        for name, side in zip(("chosen", "rejected"), sides, strict=True):
            if not any(m["role"] == "assistant" for m in side):
                raise BadRecordError("no_answer", name, "adds no assistant message to the prompt")
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not value:
            raise BadRecordError("empty", name, "adds no text to the prompt")
    if not prompt:
        raise BadRecordError("no_prompt", "", "no prompt, and the two completions have no common prefix")
    beside = template_fields(record, is_text=isinstance(prompt, str))
    return Preference(prompt, chosen, rejected, *source_and_id(record), **beside)


def to_unpaired_preference(record: Mapping[str, Any]) -> UnpairedPreference:
    """Convert a record with `prompt`, `completion` and `label` (true for a good completion). Raises BadRecordError."""
    if not (has_field(record, "completion") and has_field(record, "label")):
        raise unknown_form(record, "unpaired")
    label = record["label"]
    if isinstance(label, str):  # a cell of a table
        label = {"true": True, "1": True, "false": False, "0": False}.get(label.lower(), label)
    if label not in (True, False):
        raise BadRecordError("bad_field", "label", f"is {label!r}, not true or false")
    prompt, answer = _prompt_and_answer(record, "completion")
    beside = template_fields(record, is_text=isinstance(prompt, str))
    return UnpairedPreference(prompt, answer, bool(label), *source_and_id(record), **beside)


def _one_message(role: str, content: str) -> Messages:
    return ({"role": role, "content": content},)


def _as_messages(record: Mapping[str, Any], field: str, role: str) -> Messages:
    """Return a field that is a string (of `role`), a list of messages, or one message, as messages."""
    value = record.get(field)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return messages_of(value, field)
    return _one_message(role, text_field(record, field))


def _prompt_and_answer(record: Mapping[str, Any], answer: str) -> tuple[TextOrMessages, TextOrMessages]:
    if isinstance(record.get("prompt"), str) and isinstance(record[answer], str):
        return text_field(record, "prompt"), text_field(record, answer)
    return _as_messages(record, "prompt", "user"), _as_messages(record, answer, "assistant")


def _check_different(chosen: TextOrMessages, rejected: TextOrMessages) -> None:
    if chosen == rejected:
        raise BadRecordError("identical", "rejected", "the same as chosen")


def _common_prompt(chosen: str, rejected: str) -> str:
    """Return the prompt shared by two strings (see the top of this file)."""
    alike = (i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b)
    shared = chosen[: next(alike, min(len(chosen), len(rejected)))]
    named = shared.rfind(ASSISTANT_MARKER)
    if named >= 0:
        return shared[: named + len(ASSISTANT_MARKER)]
    ends = [
        i for i, c in enumerate(shared) if c.isspace()
    ]  # the space belongs to the completion, as in tokenizers
    if not ends:
        return ""
    return shared[: ends[-1]]
