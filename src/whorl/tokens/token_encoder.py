"""From text to token ids: prompts, training examples with a loss mask, and pairs of texts to score.

    ids        [n]  bos (if the vocabulary has one), then the prompt, then the completion
    loss_mask  [n]  True for ids in the loss: the assistant's tokens, and the id that ends its turn

Training examples. This file prevents three common errors. Sampled text that is decoded and tokenized again gets other ids. A
mask that is found by string search misses the end, so the model never learns to stop. Joint tokenization of prompt and
completion merges tokens across the border. Here a prompt is encoded exactly as for sampling, a completion is encoded alone,
and sampled completions arrive as ids. Truncation would remove the end of a long text, and so the eos: `LengthFilter` rejects
such a text and counts the reason.

Pairs have the ids of lm-evaluation-harness 0.4 for the same tokenizer: two evaluators that differ here cannot be compared.

    (context, continuation)     white space at the end of the context moves to the continuation; the whole text is encoded,
                                and the continuation's ids are those behind the number of ids of the context alone
    ("", continuation)          the context is one id: bos, or eos without a bos

A template that adds <s> adds it to both encodings. A text that begins with the text of <s> gets no second one. A template
that adds a suffix (WordPiece's [SEP]) adds it to the context too, so the slice starts after the suffix's place; the harness
does the same, and models with such templates are not causal. Tokenizers of Whorl have no template. Their models were trained
on documents that begin with bos, so bos is added by default; `add_bos=False` gives the ids of the harness.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
from whorl.tokens.chat import ChatTemplate, load_chat_template
from whorl.tokens.hf_tokenizer import AnyTokenizer, load_tokenizer
from whorl.tokens.tokenizer import Tokenizer
from whorl.tokens.vocabulary import HealedPrompt

Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class TokenizedExample:
    """One sequence. ids: [n] int64. loss_mask: [n] bool, False at 0, because no id comes before it."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.loss_mask) or not len(self.ids) or self.loss_mask[0]:
            raise DataError(
                f"an example has {len(self.ids)} ids and a mask of {len(self.loss_mask)}",
                expected="equal lengths of at least one, and the first id not in the loss",
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt_length(self) -> int:
        """Number of ids before the first one in the loss; or of all ids."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.ids)


@dataclass(frozen=True)
class EncodedPair:
    """Ids of a context and of its continuation; an empty continuation has none."""

    context: list[int]
    continuation: list[int]


class Prompted(Protocol):
    """A task with a prompt, such as `VerifiableTask`."""

    @property
    def prompt(self) -> str: ...
    @property
    def messages(self) -> Sequence[Message]: ...
    @property
    def tools(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def chat_template_kwargs(self) -> Mapping[str, Any]: ...


class TokenEncoder:
    """Encodes text for one model.

    prefix_id: the context of a text without one.

    Args:
        chat: default, the tokenizer's own template.
        add_bos: whether a text to score begins with bos; None: as its models are trained (see the top of this file).

    Raises:
        DataError: the tokenizer names neither bos nor eos.
    """

    def __init__(
        self, tokenizer: AnyTokenizer, chat: ChatTemplate | None = None, add_bos: bool | None = None
    ) -> None:
        self.tokenizer, self.add_bos = tokenizer, True if add_bos is None else add_bos
        self.chat = chat or ChatTemplate(tokenizer)
        self.prefix_id = _prefix_id(tokenizer)

    @classmethod
    def load(
        cls, folder: Path, add_bos: bool | None = None, chat_template: Path | None = None
    ) -> TokenEncoder:
        """Load the tokenizer and the chat template of a model's folder. chat_template: a file that replaces the template.

        Raises:
            DataError: a file is missing or damaged.
        """
        tokenizer = load_tokenizer(folder)
        return cls(tokenizer, load_chat_template(folder, tokenizer, chat_template), add_bos)

    def require_end(self) -> int:
        """Return the id that ends a text.

        Raises:
            DataError: the tokenizer has none, so a model cannot learn to end.
        """
        if not self.tokenizer.end_ids:
            raise DataError(
                "the tokenizer has no end-of-text token",
                expected="an eos token",
                do="choose another tokenizer",
            )
        return self.tokenizer.end_ids[0]

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """The ids that end a completion or a turn."""
        return frozenset((*self.tokenizer.end_ids, *self.chat.stop_ids))

    def banned_ids(self, n_rows: int) -> list[int]:
        """Return the ids that a model with `n_rows` output rows never samples: those that end a turn are sampled."""
        return self.tokenizer.banned_ids(n_rows, keep=self.stop_ids)

    def text_bytes(self, n_rows: int) -> list[bytes]:
        """Return the bytes of each of `n_rows` ids as a model's text."""
        return self.tokenizer.text_bytes(n_rows)

    def heal(self, text: str) -> HealedPrompt:
        """Return a prompt without its end, with which generation starts (`vocabulary.py`)."""
        return self.tokenizer.heal_prompt(text)

    # -- prompts and training examples ---------------------------------------------------------------------------------

    def prompt(
        self, prompt: str | Sequence[Message], tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:  # fmt: skip
        """Return the ids of a prompt: a text to continue, or a conversation to answer.

        tools: JSON schemas. variables: of the chat template (`chat_template_kwargs`). Both are of a conversation.

        Raises:
            DataError: the template cannot render it.
        """
        if not isinstance(prompt, str):
            return self.chat.encode_prompt(prompt, tools, variables=variables)
        return self.tokenizer.encode_prompt(prompt)

    def task_prompt(self, task: Prompted) -> list[int]:
        """Return the ids of a task's prompt. Raises DataError: as `prompt`."""
        return self.prompt(task.prompt or task.messages, task.tools, task.chat_template_kwargs)

    def after_reply(
        self,
        prompt: str | Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        stop_id: int | None = None,
    ) -> list[int]:
        """Return the ids from the end of a sampled reply to the start of the next one (`encode_after_reply`).

        After a text to continue they are the texts of `messages`, without markers: the sampled end is the border.

        Raises:
            DataError: the template cannot render it.
        """
        if isinstance(prompt, str):
            return [*map(int, self.tokenizer.encode("".join(m["content"] for m in messages)))]
        return self.chat.encode_after_reply(prompt, messages, tools, variables=variables, stop_id=stop_id)

    def prompt_completion(
        self, prompt: str | Sequence[Message], answer: str, tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> TokenizedExample:  # fmt: skip
        """Return a prompt with its completion in the loss, including the end id.

        Raises:
            DataError: the template cannot render it.
        """
        if not isinstance(prompt, str):
            content = (
                answer if self.chat.is_trained else answer.strip()
            )  # the transcript template adds its own white space
            return self.conversation([*prompt, {"role": "assistant", "content": content}], tools, variables)
        prompt_ids = self.prompt(prompt)
        return concat(prompt_ids, [*map(int, self.tokenizer.encode(answer)), self.require_end()])

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> TokenizedExample:  # fmt: skip
        """Return a conversation with every assistant turn in the loss.

        The transcript template has no id that ends a turn. There the text ends after the assistant's last message,
        and that end is in the loss.

        Raises:
            DataError: the template cannot render it, or changes earlier text.
        """
        ids, mask = self.chat.encode_with_mask(messages, tools, variables=variables)
        if not self.chat.is_trained and messages and messages[-1].get("role") == "assistant":
            ids, mask = [*ids, self.require_end()], [*mask, True]
        if mask and mask[0]:
            mask[0] = False
        return TokenizedExample(np.array(ids, np.int64), np.array(mask, np.bool_))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a completion up to its stop id, with replacement characters for invalid bytes."""
        kept = []
        for i in ids:
            if i in self.stop_ids:
                break
            kept.append(i)
        return self.tokenizer.decode(kept).decode("utf-8", "replace")

    # -- texts to score ------------------------------------------------------------------------------------------------

    def encode_texts(
        self, texts: Iterable[str], *, add_special_tokens: bool | None = None
    ) -> dict[str, list[int]]:
        """Return the ids of each distinct text. add_special_tokens: with <s>; None: as this encoder is set.

        Raises:
            DataError: a text holds a lone surrogate, which has no bytes.
        """
        distinct = list(dict.fromkeys(texts))
        for text in distinct:
            _check_text(text)
        add = self.add_bos if add_special_tokens is None else add_special_tokens
        tokenizer = self.tokenizer
        if isinstance(tokenizer, Tokenizer):
            bos = [tokenizer.bos_id] if add else []
            found = tokenizer.encode_batch(distinct)
            return {text: bos + ids.tolist() for text, ids in zip(distinct, found, strict=True)}
        out: dict[str, list[int]] = {}
        texts_of_ids = {i: text for text, i in tokenizer.added_tokens.items()}
        prefix = texts_of_ids.get(self.prefix_id, "")
        begins = [bool(prefix) and text.startswith(prefix) for text in distinct]
        if add_special_tokens is not None:
            begins = [False] * len(distinct)
        for group in (False, True):
            own = [text for text, starts in zip(distinct, begins, strict=True) if starts == group]
            out.update(
                zip(own, tokenizer.encode_batch(own, add_special_tokens=add and not group), strict=True)
            )
        return out

    def encode_pairs(self, pairs: Sequence[tuple[str | Sequence[Message], str]]) -> list[EncodedPair]:
        """Return the ids of (context, continuation) pairs. A context may be a conversation.

        Raises:
            DataError: a text holds a lone surrogate, which has no bytes; or the chat template rejects a conversation.
        """
        chats = [EncodedPair(*self.chat.encode_pair(c, rest)) for c, rest in pairs if not isinstance(c, str)]
        if chats:
            texts = iter(self.encode_pairs([pair for pair in pairs if isinstance(pair[0], str)]))
            found = iter(chats)
            return [next(texts if isinstance(context, str) else found) for context, _ in pairs]
        moved = [move_space(context, rest) for context, rest in pairs if isinstance(context, str)]
        encoded = self.encode_texts(
            text for context, rest in moved if context for text in (context, context + rest)
        )
        alone = self.encode_texts((rest for context, rest in moved if not context), add_special_tokens=False)
        out = []
        for context, rest in moved:
            if context:
                before = encoded[context]
                out.append(EncodedPair(before, encoded[context + rest][len(before) :]))
            elif alone[rest][:1] == [self.prefix_id]:
                out.append(EncodedPair(alone[rest][:1], alone[rest][1:]))
            else:
                out.append(EncodedPair([self.prefix_id], alone[rest]))
        return out

    def encode_document(self, text: str, *, score_bos: bool = False) -> list[int]:
        """Return the ids of a text to score as a whole; the first one, bos or its substitute, is not scored.

        score_bos: put it before a bos that the tokenizer adds, too, which is scored then, as the harness does.
        """
        ids = self.encode_texts([text])[text]
        return ids if ids[:1] == [self.prefix_id] and not score_bos else [self.prefix_id, *ids]

    def encode_context(self, text: str) -> list[int]:
        """Return the ids of a text to continue, as those of a context."""
        return self.encode_texts([text])[text] or [self.prefix_id]

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id alone; parts of a character are replaced."""
        return [self.tokenizer.decode([i]).decode("utf-8", "replace") for i in ids]


def concat(prompt: Sequence[int], answer: Sequence[int]) -> TokenizedExample:
    """Return an example of `prompt` and `answer`, with the answer in the loss; for sampled ids."""
    mask = np.zeros(len(prompt) + len(answer), np.bool_)
    mask[len(prompt) :] = True
    return TokenizedExample(np.array([*prompt, *answer], np.int64), mask)


@dataclass
class LengthFilter:
    """Accepts examples of at most `max_length` ids with something in the loss; counts the others by reason.

    too_long: reason for longer ones, which may name a setting.
    """

    max_length: int
    too_long: str = ""
    rejected: dict[str, int] = field(default_factory=dict)

    def tokenize(self, items: Iterable[T], encode: Callable[[T], TokenizedExample]) -> list[TokenizedExample]:
        """Return the accepted examples of `encode`; items that it rejects with DataError are counted."""
        examples = []
        for item in items:
            try:
                example = encode(item)
            except DataError as error:
                self.reject(error)
                continue
            if self.accepts(example):
                examples.append(example)
        return examples

    def accepts(self, *texts: TokenizedExample) -> bool:
        """Return whether all are accepted; otherwise count the reason once, because they belong together."""
        if max(len(text) for text in texts) > self.max_length:
            self.reject(self.too_long or f"longer than {self.max_length:,} ids")
        elif not all(text.loss_mask.any() for text in texts):
            self.reject("no target in the loss")
        else:
            return True
        return False

    def reject(self, reason: str | DataError) -> None:
        """Count a rejected item."""
        reason = str(reason).splitlines()[0]
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def advice(self, setting: str) -> str:
        """Return what to do where nothing is left. setting: that bounds the length, with its value."""
        most = max(self.rejected, key=self.rejected.__getitem__, default="")
        return f"raise {setting}" if most.startswith("longer than") else "correct the records, or give others"

    @property
    def summary(self) -> str:
        """Counts as text, or an empty string."""
        return "; ".join(f"{n:,} rejected: {reason}" for reason, n in sorted(self.rejected.items()))


def move_space(context: str, continuation: str) -> tuple[str, str]:
    """Move white space from the end of the context to the continuation."""
    kept = context.rstrip()
    return (kept, context[len(kept) :] + continuation)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text of the request holds {text[error.start]!r} at {error.start}",
            expected="text that UTF-8 can spell",
        ) from error


def _prefix_id(tokenizer: AnyTokenizer) -> int:
    ids: list[int | None] = [tokenizer.bos_id, tokenizer.eos_id, *tokenizer.end_ids]
    for prefix in ids:
        if prefix is not None:
            return prefix
    raise DataError(
        "the tokenizer names neither a bos nor an eos token",
        expected="one of them in tokenizer_config.json, as the context of a text without one",
    )
