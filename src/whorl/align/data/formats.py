"""Record formats of conversations, preferences and labelled completions, converted to one type each.

    Conversation          messages                               SFT: every assistant turn
    PromptCompletion      prompt, completion (strings)           SFT of a model without a chat template
    Preference            prompt; chosen, rejected               DPO and related objectives, reward models
    UnpairedPreference    prompt; completion, label              KTO
    VerifiableTask        (evals/verify)                         a prompt whose answer a program can check

A record is a mapping from JSON or Parquet. Conversations come as `messages` (role, content), as ShareGPT's
`conversations` (from, value), as Alpaca's instruction / input / output, or as prompt / completion. Preferences come
with a prompt and two completions, as strings or as messages. Either completion may repeat the prompt or include it.
These are the formats of TRL's page "dataset formats".

The subtle point is a pair without a prompt. For messages the prompt is the shared turns. For strings it is the longest
common prefix. That may end inside a word ("bl" of blue and black), where no tokenizer would split. So it is cut at
the end of the last "Assistant:" or, without one, of the last whole word.

Nothing is repaired by guessing: a record without a known format raises `BadRecordError` with the faulty field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from whorl.data.quarantine import BadRecordError
from whorl.errors import DataError
from whorl.evals.verify.task import VerifiableTask

Message = Mapping[str, Any]
Messages = tuple[Message, ...]
TextOrMessages = str | Messages  # a string to continue and its continuation, or a conversation and its answer

ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
ASSISTANT_MARKER = "\n\nAssistant:"


@dataclass(frozen=True)
class Conversation:
    """Messages (role, content, optional tool_calls ...), at least one from the assistant, with source and id."""

    messages: Messages
    source: str = ""
    id: str = ""


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

    Raises:
        DataError: the completions are equal, or strings and messages are mixed.
    """

    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    source: str = ""
    id: str = ""

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
    """A completion of a prompt, and whether it is good. Both are strings, or both are messages."""

    prompt: TextOrMessages
    completion: TextOrMessages
    label: bool
    source: str = ""
    id: str = ""


def to_conversation(record: Mapping[str, Any]) -> Conversation:
    """Convert a record in one of the four formats. Raises BadRecordError."""
    if _has(record, "messages"):
        messages = _messages(record["messages"], "messages")
    elif _has(record, "conversations"):
        messages = _messages(record["conversations"], "conversations")
        if isinstance(record.get("system"), str) and record["system"].strip():
            messages = ({"role": "system", "content": record["system"]}, *messages)
    elif _has(record, "instruction"):
        question = _text(record, "instruction")
        extra = record.get("input") or ""
        if not isinstance(extra, str):
            raise BadRecordError("bad_field", "input", f"is {_type_name(extra)}, not a text")
        answer = _text(record, "output")
        messages = _one_message(
            "user", f"{question}\n\n{extra}" if extra.strip() else question
        ) + _one_message("assistant", answer)
    elif _has(record, "prompt"):
        messages = _as_messages(record, "prompt", "user") + _as_messages(record, "completion", "assistant")
    else:
        raise _unknown_shape(record, "messages; conversations; instruction and output; prompt and completion")
    if not any(m["role"] == "assistant" for m in messages):
        raise BadRecordError("no_answer", "", f"{len(messages)} messages, none from the assistant")
    return Conversation(messages, *_source_and_id(record))


def to_prompt_completion(record: Mapping[str, Any]) -> PromptCompletion:
    """Convert a record with the strings `prompt` (may be empty) and `completion`. Raises BadRecordError."""
    if not _has(record, "completion"):
        raise _unknown_shape(record, "prompt and completion, as texts")
    prompt = record.get("prompt") or ""
    if not isinstance(prompt, str):
        raise BadRecordError("bad_field", "prompt", f"is {_type_name(prompt)}, not a text")
    return PromptCompletion(prompt, _text(record, "completion"), *_source_and_id(record))


def to_preference(record: Mapping[str, Any]) -> Preference:
    """Convert a record with `chosen` and `rejected`, and `prompt` unless they include it. Raises BadRecordError."""
    if not (_has(record, "chosen") and _has(record, "rejected")):
        raise _unknown_shape(record, "prompt, chosen and rejected")
    texts = all(isinstance(record[k], str) for k in ("chosen", "rejected"))
    prompt: TextOrMessages
    chosen: TextOrMessages
    rejected: TextOrMessages
    if texts and isinstance(record.get("prompt", ""), str | None):
        chosen, rejected = _text(record, "chosen"), _text(record, "rejected")
        _check_different(chosen, rejected)
        if _has(record, "prompt"):
            prompt = _text(record, "prompt")
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
        if _has(record, "prompt"):
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
    return Preference(prompt, chosen, rejected, *_source_and_id(record))


def to_unpaired_preference(record: Mapping[str, Any]) -> UnpairedPreference:
    """Convert a record with `prompt`, `completion` and `label` (true for a good completion). Raises BadRecordError."""
    if not (_has(record, "completion") and _has(record, "label")):
        raise _unknown_shape(record, "prompt, completion and label")
    label = record["label"]
    if label not in (True, False):
        raise BadRecordError("bad_field", "label", f"is {label!r}, not true or false")
    prompt, answer = _prompt_and_answer(record, "completion")
    return UnpairedPreference(prompt, answer, bool(label), *_source_and_id(record))


def to_task(record: Mapping[str, Any]) -> VerifiableTask:
    """Convert a record with `prompt` or `messages`, `verifier`, `answer`, `difficulty`. Raises BadRecordError."""
    if not (_has(record, "prompt") or _has(record, "messages")):
        raise _unknown_shape(record, "prompt or messages, verifier, answer")
    field = "prompt" if _has(record, "prompt") else "messages"
    if field == "prompt" and _has(record, "messages"):
        raise BadRecordError("bad_field", "messages", "given together with prompt")
    text = _text(record, "prompt") if isinstance(record[field], str) and field == "prompt" else ""
    messages = () if text else _messages(record[field], field)
    answer = record.get("answer", "")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        raise BadRecordError("bad_field", "answer", f"is {_type_name(answer)}, not a text")
    _encodable(answer, "answer")
    difficulty = record.get("difficulty") or 0.0
    if not isinstance(difficulty, int | float):
        raise BadRecordError("bad_field", "difficulty", f"is {_type_name(difficulty)}, not a number")
    verifier = _text(record, "verifier")
    return VerifiableTask(_source_and_id(record)[1], text, messages, verifier, answer, float(difficulty))


def _has(record: Mapping[str, Any], field: str) -> bool:
    return record.get(field) is not None  # a Parquet column holds null where a record has no such field


def _type_name(value: object) -> str:
    return {"NoneType": "missing", "str": "a text", "list": "a list", "dict": "an object"}.get(
        type(value).__name__, f"a {type(value).__name__}"
    )


def _unknown_shape(record: Mapping[str, Any], expected: str) -> BadRecordError:
    fields = ", ".join(str(k)[:40] for k in list(record)[:10]) or "none"
    return BadRecordError("unknown_shape", "", f"fields: {fields}; expected {expected}")


def _source_and_id(record: Mapping[str, Any]) -> tuple[str, str]:
    source, name = record.get("source"), record.get("id")
    return ("" if source is None else str(source)), ("" if name is None else str(name))


def _encodable(text: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRecordError("invalid_utf8", field, f"lone surrogate at character {error.start}") from None
    return text


def _text(record: Mapping[str, Any], field: str) -> str:
    value = record.get(field)
    if not isinstance(value, str):
        raise BadRecordError("bad_field", field, f"is {_type_name(value)}, not a text")
    if not value.strip():
        raise BadRecordError("empty", field, "only white space")
    return _encodable(value, field)


def _one_message(role: str, content: str) -> Messages:
    return ({"role": role, "content": content},)


def _as_messages(record: Mapping[str, Any], field: str, role: str) -> Messages:
    """Return a field that is a string (of `role`), a list of messages, or one message, as messages."""
    value = record.get(field)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _messages(value, field)
    return _one_message(role, _text(record, field))


def _prompt_and_answer(record: Mapping[str, Any], answer: str) -> tuple[TextOrMessages, TextOrMessages]:
    if isinstance(record.get("prompt"), str) and isinstance(record[answer], str):
        return _text(record, "prompt"), _text(record, answer)
    return _as_messages(record, "prompt", "user"), _as_messages(record, answer, "assistant")


def _messages(value: object, field: str) -> Messages:
    """Return messages of (role, content) or (from, value) with the keys of the former; null fields are dropped."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise BadRecordError("bad_field", field, f"is {_type_name(value)}, not a list of messages")
    if not value:
        raise BadRecordError("empty", field, "no message")
    return tuple(_message(m, f"{field}[{i}]") for i, m in enumerate(value))


def _message(value: object, field: str) -> Message:
    if not isinstance(value, Mapping):
        raise BadRecordError("bad_field", field, f"is {_type_name(value)}, not a message")
    role_key, content_key = ("role", "content") if _has(value, "role") else ("from", "value")
    role = value.get(role_key)
    if not isinstance(role, str) or role.lower() not in ROLES:
        raise BadRecordError("bad_role", f"{field}.{role_key}", f"{role!r} is not one of {', '.join(ROLES)}")
    rest = {k: v for k, v in value.items() if v is not None and k not in (role_key, content_key)}
    content = value.get(content_key)
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(p.get("text") or "") for p in content)
    if content is None and rest.get("tool_calls"):
        content = ""
    if not isinstance(content, str):
        raise BadRecordError("bad_field", f"{field}.{content_key}", f"is {_type_name(content)}, not a text")
    known_role = ROLES[role.lower()]
    # A tool may return nothing; an empty user or assistant message is an error.
    if not content.strip() and known_role in ("user", "assistant") and not rest.get("tool_calls"):
        raise BadRecordError("empty", f"{field}.{content_key}", "only white space")
    return {"role": known_role, "content": _encodable(content, f"{field}.{content_key}"), **rest}


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
