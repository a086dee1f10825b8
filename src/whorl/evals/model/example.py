"""Training examples: token ids with a loss mask, both made once where the text is tokenized.

    ids        [n]  bos (if the vocabulary has one), then the prompt, then the completion
    loss_mask  [n]  True for ids in the loss: the assistant's tokens, and the id that ends its turn

This file prevents three common errors. Sampled text that is decoded and tokenized again gets other ids. A mask that is
found by string search misses the end, so the model never learns to stop. Joint tokenization of prompt and completion
merges tokens across the border. Here a prompt is encoded exactly as for sampling, a completion is encoded alone,
and sampled completions arrive as ids.

The subtle point is truncation: cutting a long text would remove its end and the eos. `LengthFilter` rejects it and
counts the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
from whorl.evals.grading.task import VerifiableTask
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer

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


class ExampleTokenizer:
    """Makes training examples and sampling prompts with one tokenizer.

    chat: default, the tokenizer's own template.

    Raises:
        DataError: the tokenizer has no end-of-text token.
    """

    def __init__(self, tokenizer: Tokenizer | HFTokenizer, chat: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = chat or ChatTemplate(tokenizer)
        self.stop_ids = frozenset(tokenizer.end_ids) | frozenset(self.chat.stop_ids)
        if not tokenizer.end_ids:
            raise DataError(
                "the tokenizer has no end-of-text token",
                expected="an eos token",
                do="choose another tokenizer",
            )

    def banned_ids(self, n_rows: int) -> list[int]:
        """Return the ids that a model with `n_rows` output rows never samples: those that end a turn are sampled."""
        return self.tokenizer.banned_ids(n_rows, keep=self.stop_ids)

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
        if isinstance(self.tokenizer, Tokenizer):
            return [self.tokenizer.bos_id, *map(int, self.tokenizer.encode(prompt))]
        return self.tokenizer.encode_prompt(prompt)

    def task_prompt(self, task: VerifiableTask) -> list[int]:
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
        return concat(prompt_ids, [*map(int, self.tokenizer.encode(answer)), self.tokenizer.end_ids[0]])

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
            ids, mask = [*ids, self.tokenizer.end_ids[0]], [*mask, True]
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
