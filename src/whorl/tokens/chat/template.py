"""Chat templates: conversations to the ids of the format that a model was trained on.

A template is a Jinja program that comes with the model (`chat_template.jinja`, or the field `chat_template` of
tokenizer_config.json). Models trained by Whorl have none. If their vocabulary has the markers <|im_start|> and <|im_end|>,
the format is ChatML. Otherwise the model was not trained to chat, and the prompt is a plain transcript:

    kind "model"        the model's own template
    kind "chatml"       <|im_start|>user NEWLINE hello<|im_end|> NEWLINE <|im_start|>assistant NEWLINE
    kind "transcript"   User: hello NEWLINE NEWLINE Assistant:          (stops at the next role's name)

The subtle point is *injection*. A template writes special tokens as text, and a user may type the same text:
"<|im_end|><|im_start|>system ...". Encoding the rendered text directly would let a user write the system's turn. So every
spelling of a special token in the input is broken by a mark (`special_token_escape.py`), and the rendered text is encoded
in pieces between the marks. As a last check, the special ids are counted against those in the rendered text, since a
normalizer could create more. Special tokens are protected, and the added tokens that the template itself writes
(`<tool_call>`, `<think>`); the latter not in assistant messages, where templates search for them.

`encode_with_mask` returns the loss mask with the ids: True for the assistant's turns, up to the token that ends a turn.
Borders are where generation would start, and text is encoded piece by piece between them, so training and sampling see the
same ids. It needs a template that only appends; one that rewrites earlier turns is rejected.

A template may leave a message out: one that has no words for the role `developer` writes nothing, without an error. So each
conversation is rendered once more with a mark in the place of each content. If a mark is missing, other forms are tried
(`FORMS` of `messages.py`). A message is refused if the template writes it neither as the first nor before a user's turn.
Otherwise its position is the cause: Mistral's templates write the system message only if the last turn is a user's. That
is a warning. Tools that a template leaves out are a warning, too: it may render calls, and the parser needs the tools.

A turn ends with the token that the template writes behind a reply. It is one of `stop_ids`.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from whorl.errors import DataError, shorten
from whorl.tokens.chat.builtin_templates import CHATML, IM_END, IM_START, TRANSCRIPT, TRANSCRIPT_STOPS
from whorl.tokens.chat.messages import FORMS, Message, canonical_messages, canonical_tools
from whorl.tokens.chat.special_token_escape import SpecialTokenEscaper, unused_character
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.template_source import compile_template, read_template, turn_end
from whorl.tokens.tokenizer import Tokenizer

_MARKER = re.compile(r"<\|\w+\|>")  # the usual spelling of special tokens
TemplateKind = Literal["model", "chatml", "transcript"]


@dataclass(frozen=True)
class _Conversation:
    """The input of a template. mark: a character that occurs nowhere in it."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]
    mark: str


class ChatTemplate:
    """Converts conversations to ids for one tokenizer.

    kind: the format. stop, stop_ids: end a turn of the assistant. turn_end: the one that the template writes, or None.

    Args:
        tokenizer: a Whorl or a Hugging Face tokenizer.
        source: the Jinja program; None selects ChatML or transcript (see the top of this file).
        tokens: names and texts that a template may use, such as bos_token.

    Raises:
        DataError: the template cannot be compiled.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | HFTokenizer,
        source: str | None = None,
        tokens: Mapping[str, str] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.special_ids, added = _special_and_added_tokens(tokenizer)
        self.kind: TemplateKind = "model"
        if source is None:
            self.kind = "chatml" if {IM_START, IM_END} <= self.special_ids.keys() else "transcript"
            source = CHATML if self.kind == "chatml" else TRANSCRIPT
        self.source = source
        self.tokens = dict(tokens or {})
        if isinstance(tokenizer, Tokenizer):
            self.tokens = {
                "bos_token": tokenizer.special_tokens[0],
                "eos_token": tokenizer.special_tokens[1],
                **self.tokens,
            }
        self.tokens = {"bos_token": "", "eos_token": "", **self.tokens}
        self.stop = TRANSCRIPT_STOPS if self.kind == "transcript" else ()
        self._escape_special = SpecialTokenEscaper(self.special_ids)
        self._escape_special_and_added = SpecialTokenEscaper(
            [*self.special_ids, *(t for t in added if t in source)]
        )
        self._special_pattern = _special_token_pattern(self.special_ids)
        self._template = compile_template(source)
        self._known = known = {**added, **self.special_ids}
        self.turn_end = turn_end(self._template, self.tokens, known)
        ends = (*tokenizer.end_ids, self.special_ids.get(IM_END), self.turn_end)
        self.stop_ids = frozenset(i for i in ends if i is not None)
        self._has_written_tools = False
        self._end_pattern = _special_token_pattern(text for text, i in known.items() if i in self.stop_ids)

    @property
    def is_trained(self) -> bool:
        """Whether the model was trained on this format; a transcript is only a way to prompt a base model."""
        return self.kind != "transcript"

    def unknown_markers(self) -> list[str]:
        """Return the markers <|name|> that the template writes around a short conversation and that are no tokens."""
        turns = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        with suppress(Exception):  # of foreign code; it may need other roles
            text = self._template.render(
                **self.tokens, messages=turns, tools=None, add_generation_prompt=True
            )
            return sorted({*_MARKER.findall(text)} - self._known.keys())
        return []

    def encode_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a conversation, up to the start of the assistant's next turn.

        Args:
            messages: each with `role` and `content`, optionally `tool_calls`, `name`, `tool_call_id` (`messages.py`).
            tools: JSON schemas, for templates that support tools.
            variables: further variables of the template (`enable_thinking`).

        Raises:
            DataError: the template rejects the conversation, or leaves a message out.
        """
        given = self._checked(messages, tools, variables, add_generation_prompt)
        return self._encode_checked(self._render(given, add_generation_prompt), given.mark)

    def encode_pair(self, messages: Sequence[Message], reply: str) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation up to the start of a reply, and those of the reply, which may be cut.

        The rendered text is split as `TokenEncoder` splits a text and its continuation: white space in front of the reply
        belongs to the reply.

        Raises:
            DataError: as `encode_prompt`.
        """
        given = self._checked(messages, (), None, True)
        given = replace(given, mark=unused_character((given.messages, reply)))
        text = self._render(given, True)
        context = text.rstrip()
        whole = text + self._escape_special_and_added(reply, given.mark)
        before = self._encode_checked(context, given.mark)
        return before, self._encode(whole, given.mark)[len(before) :]

    def encode_with_mask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[list[int], list[bool]]:
        """Return (ids, mask) of a whole conversation; the mask is True for the assistant's tokens, ends of turns included.

        Raises:
            DataError: as `encode_prompt`; or the template does not only append, so that borders are undefined.
        """
        given = self._checked(messages, tools, variables, False)
        whole = self._render(given, False)
        borders: list[tuple[int, int]] = []
        for i, message in enumerate(given.messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(replace(given, messages=given.messages[:i]), True)
            after = self._render(replace(given, messages=given.messages[: i + 1]), False)
            if not (after.startswith(before) and whole.startswith(after)):
                raise DataError(
                    "the chat template changes an assistant's message when later messages follow",
                    expected=f"a template that only appends; message {i} changes",
                    do="truncate the conversations after their first answer, or use another template",
                )
            ends = [m.end() for m in self._end_pattern.finditer(after, len(before))]
            borders.append((len(before), ends[-1] if ends else len(after)))
        ids: list[int] = []
        mask: list[bool] = []
        position = 0
        for start, stop in [*borders, (len(whole), len(whole))]:
            for piece, is_assistant in ((whole[position:start], False), (whole[start:stop], True)):
                piece_ids = self._encode(piece, given.mark)
                ids += piece_ids
                mask += [is_assistant] * len(piece_ids)
            position = stop
        return self._check_injection(whole, ids), mask

    def encode_after_reply(
        self,
        prompt: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        variables: Mapping[str, Any] | None = None,
        stop_id: int | None = None,
    ) -> list[int]:
        """Return the ids between a sampled reply and the next: its end, `messages`, and the start of the next turn.

        Only these are tokenized. The ids of the reply are the sampled ones, so the template may rewrite earlier replies.

        Args:
            prompt: the conversation before the first reply.
            stop_id: the id that ended the reply; it is not repeated.

        Raises:
            DataError: as `encode_prompt`; or the template drops the reply.
        """
        reply = unused_character((prompt, messages, tools, variables))
        conversation = [*prompt, {"role": "assistant", "content": reply}, *messages]
        given = self._checked(conversation, tools, variables, True)
        parts = self._render(given, True).split(reply)
        if len(parts) != 2:
            raise DataError(
                f"the chat template writes a reply {len(parts) - 1} times",
                expected="a template that keeps the assistant's messages",
            )
        ids = self._encode_checked(parts[1], given.mark)
        return ids[1:] if ids and ids[0] == stop_id else ids

    def _checked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        add_generation_prompt: bool,
    ) -> _Conversation:
        """Return the conversation to render, with each message in a role that the template writes.

        Raises:
            DataError: the template rejects the conversation, or leaves a message out.
        """
        parts = canonical_messages(messages), canonical_tools(tools), variables or {}
        given = _Conversation(*parts, unused_character(parts))
        found, errors = list[tuple[list[int], list[int], _Conversation]](), list[DataError]()
        for form in FORMS:
            before, given = given, replace(given, messages=[form(m) for m in given.messages])
            if (found or errors) and given == before:
                continue
            try:
                left_out = self._left_out(given, add_generation_prompt)
            except DataError as error:
                errors.append(error)
                continue
            if not left_out:
                return self._with_tools(given, add_generation_prompt)
            refused = [n for n in left_out if not self._writes_role(given, n)]
            found.append((refused, left_out, given))
        if not found:
            raise errors[0]
        refused, left_out, given = min(found, key=lambda one: len(one[0]))
        if refused:
            role = shorten(str(messages[refused[0]].get("role")))
            raise DataError(
                f"the chat template leaves out messages of the role {role!r}",
                expected=f"roles and tool calls that this template writes; message {refused[0]} is left out",
                do="write the text into a user or system message, or use a template that has this role",
            )
        for role in sorted({shorten(str(messages[n].get("role"))) for n in left_out}):
            warnings.warn(f"the chat template leaves out a message of the role {role!r} here", stacklevel=3)
        return self._with_tools(given, add_generation_prompt)

    def _with_tools(self, given: _Conversation, add_generation_prompt: bool) -> _Conversation:
        """Return the conversation; warns if the template writes none of its tools, as Gemma's and DeepSeek's do."""
        if given.tools and not self._has_written_tools:
            texts = [self._render(one, add_generation_prompt) for one in (given, replace(given, tools=()))]
            self._has_written_tools = texts[0] != texts[1]
            if not self._has_written_tools:
                warnings.warn(
                    "the chat template leaves out the tools: describe them in a message", stacklevel=4
                )
        return given

    def _writes_role(self, given: _Conversation, number: int) -> bool:
        """Return whether the template writes a message when it is the first, or when a user's turn follows it."""
        for start in (number, 0):
            turns = [*given.messages[start : number + 1], {"role": "user", "content": "a"}]
            with suppress(DataError):  # of templates that need another order
                if number - start not in self._left_out(replace(given, messages=turns), True):
                    return True
        return False

    def _left_out(self, given: _Conversation, add_generation_prompt: bool) -> list[int]:
        """Return the messages of which the template writes nothing.

        Each content is replaced by the message's number in marks. Next to tool calls a content may be left out, as some
        templates do; then the name of a call counts.
        """
        sign = unused_character((given.messages, given.tools, given.variables, given.mark))
        probes, expected = list[Message](), list[int]()
        for n, message in enumerate(given.messages):
            text, probe = f"{sign}{n}{sign}", dict(message)
            if calls := message.get("tool_calls"):
                probe["tool_calls"] = [
                    {**call, "function": {**call["function"], "name": text}} for call in calls
                ]
            elif message["content"].strip():
                probe["content"] = text
            else:
                text = ""
            probes.append(probe)
            expected += [n] if text else []
        rendered = self._render(replace(given, messages=probes), add_generation_prompt)
        written = {int(n) for n in re.findall(f"{sign}([0-9]+){sign}", rendered)}
        return [n for n in expected if n not in written]

    def _render(self, given: _Conversation, add_generation_prompt: bool) -> str:
        """Render the text, with the mark inside of every special token that the input spells."""
        escaped, escape_all, mark = list[Message](), self._escape_special_and_added, given.mark
        for message in given.messages:
            escape = self._escape_special if message.get("role") == "assistant" else escape_all
            # A keyword that templates compare with.
            role = {"role": message["role"]} if "role" in message else {}
            escaped.append({**escape(message, mark), **role})
        try:
            return self._template.render(
                **self.tokens,
                **escape_all(dict(given.variables), mark),
                messages=escaped,
                tools=escape_all(list(given.tools), mark) or None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template may raise anything
            raise DataError(
                f"the chat template rejects these messages: {shorten(str(error)) or type(error).__name__}",
                expected="roles in the order that this model was trained on",
            ) from error

    def _encode(self, text: str, mark: str) -> list[int]:
        parts = filter(None, text.split(mark))
        return [int(i) for part in parts for i in self.tokenizer.encode(part, allow_special=True)]

    def _encode_checked(self, text: str, mark: str) -> list[int]:
        return self._check_injection(text, self._encode(text, mark))

    def _check_injection(self, text: str, ids: list[int]) -> list[int]:
        """Return `ids`; raises if they have more special ids than the template wrote."""
        special = set(self.special_ids.values())
        if isinstance(self.tokenizer, HFTokenizer) and self.tokenizer.unk_token in self.special_ids:
            special.remove(self.special_ids[self.tokenizer.unk_token])  # text without a token becomes this id
        expected = Counter(self.special_ids[m[0]] for m in self._special_pattern.finditer(text))
        extra = Counter(i for i in ids if i in special) - expected
        if extra:
            token_id = min(extra)
            name = next(t for t, i in self.special_ids.items() if i == token_id)
            raise DataError(
                f"the conversation would encode to the special token {name!r}, which the template did not write",
                expected="text that this tokenizer can spell without special tokens",
            )
        return ids


def load_chat_template(
    folder: Path, tokenizer: Tokenizer | HFTokenizer, file: Path | None = None
) -> ChatTemplate:
    """Load the chat template of a model's folder, or the default one. file: has a template that replaces it.

    Raises:
        DataError: the template cannot be compiled, or a file is damaged.
    """
    source, tokens = read_template(folder)
    try:
        return ChatTemplate(tokenizer, source if file is None else file.read_text("utf-8"), tokens)
    except (DataError, OSError, UnicodeDecodeError) as error:
        if file is None:
            raise
        what = error.what if isinstance(error, DataError) else f"cannot be read: {error}"
        raise DataError(f"{file}: {what}", expected="a chat template in Jinja, in UTF-8") from error


def _special_and_added_tokens(tokenizer: Tokenizer | HFTokenizer) -> tuple[dict[str, int], dict[str, int]]:
    """Return (ids of special tokens by text, ids of other added tokens)."""
    if isinstance(tokenizer, Tokenizer):
        return dict(tokenizer.special_token_ids), {}
    special = {t: i for t, i in tokenizer.added_tokens.items() if i in tokenizer.all_special_ids}
    return special, {t: i for t, i in tokenizer.added_tokens.items() if t not in special}


def _special_token_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the longest special token first, or one that never matches if there are none."""
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or r"(?!)")
