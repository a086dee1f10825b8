"""A text to learn from: token ids, and which of them are to be learnt, made in one place and never again.

    ids    [n]  bos (if the vocabulary has one), then what was there before, then what is learnt
    mask   [n]  True for the ids that are learnt: what the assistant says, and the id that ends its turn

The known mistakes of this field are mistakes of this file. Text that was sampled is decoded and tokenised again, and other
ids come out than were sampled; a mask is found afterwards by looking for strings, and leaves out the end, so that the model
never learns to stop; prompt and answer are tokenised together, and a token spans the border. Here a prompt is encoded as it
will be when something is sampled after it, the answer is encoded by itself, and what a model sampled arrives as ids.

The subtle part is truncation: a text that is longer than the room would lose its end, and with it the eos. It is refused
(`Room`), counted by its reason, and the rest goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whorl.errors import DataError
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer

Message = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class TokenizedExample:
    """One sequence. ids: [n] int64; mask: [n] bool, False at 0, since nothing comes before it."""

    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    def __post_init__(self) -> None:
        if len(self.ids) != len(self.loss_mask) or not len(self.ids) or self.loss_mask[0]:
            raise DataError(
                f"a text of {len(self.ids)} ids with a mask of {len(self.loss_mask)}",
                expected="as many of both, one at least, and the first id not to be learnt",
            )

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def prompt_length(self) -> int:
        """Ids before the first that is learnt; all of them, if none is."""
        return int(self.loss_mask.argmax()) if self.loss_mask.any() else len(self.ids)


class ExampleTokenizer:
    """Makes texts for one tokenizer, and the prompts that are sampled after.

    Args:
        tokenizer: ours or that of others.
        chat: how it writes conversations; by default the house's template for it.

    ends: ids that end an answer; control: ids that are never to be sampled.
    """

    def __init__(self, tokenizer: Tokenizer | HFTokenizer, chat: ChatTemplate | None = None) -> None:
        self.tokenizer = tokenizer
        self.chat = chat or ChatTemplate(tokenizer)
        self.stop_ids = frozenset(tokenizer.end_ids) | frozenset(self.chat.stop_ids)
        self.control_ids = tuple(tokenizer.control_ids)
        if not tokenizer.end_ids:
            raise DataError(
                "the tokenizer has no token that ends a text",
                expected="an eos",
                do="choose another tokenizer",
            )

    def prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """The ids that an answer is sampled after: of a text to be continued, or a conversation to be answered.

        Raises:
            DataError: the template cannot write it.
        """
        if not isinstance(prompt, str):
            return self.chat.encode_prompt(prompt)
        if isinstance(self.tokenizer, Tokenizer):
            return [self.tokenizer.bos_id, *map(int, self.tokenizer.encode(prompt))]
        return self.tokenizer.encode_prompt(prompt)

    def prompt_completion(self, prompt: str | Sequence[Message], answer: str) -> TokenizedExample:
        """A prompt with the answer that is to be learnt, its end included.

        Raises:
            DataError: the template cannot write it.
        """
        if not isinstance(prompt, str):
            said = (
                answer if self.chat.is_trained else answer.strip()
            )  # a transcript has its own white space around
            return self.conversation([*prompt, {"role": "assistant", "content": said}])
        before = self.prompt(prompt)
        return concat(before, [*map(int, self.tokenizer.encode(answer)), self.tokenizer.end_ids[0]])

    def conversation(self, messages: Sequence[Message]) -> TokenizedExample:
        """A conversation, of which every turn of the assistant is learnt.

        A transcript has no id that ends a turn: after an assistant's last word the text ends, and that is learnt too.

        Raises:
            DataError: the template cannot write it, or does not only append.
        """
        ids, mask = self.chat.encode_with_mask(messages)
        if not self.chat.is_trained and messages and messages[-1].get("role") == "assistant":
            ids, mask = [*ids, self.tokenizer.end_ids[0]], [*mask, True]
        if mask and mask[0]:
            mask[0] = False
        return TokenizedExample(np.array(ids, np.int64), np.array(mask, np.bool_))

    def decode(self, ids: Iterable[int]) -> str:
        """What an answer of these ids says: up to the id that ends it, with a mark for bytes that are no text."""
        said = []
        for i in ids:
            if i in self.stop_ids:
                break
            said.append(i)
        return self.tokenizer.decode(said).decode("utf-8", "replace")


def concat(prompt: Sequence[int], answer: Sequence[int]) -> TokenizedExample:
    """A text of which `answer` is learnt: for ids that were sampled, these ids."""
    mask = np.zeros(len(prompt) + len(answer), np.bool_)
    mask[len(prompt) :] = True
    return TokenizedExample(np.array([*prompt, *answer], np.int64), mask)


@dataclass
class LengthFilter:
    """Takes texts in that have room in `length` ids and something to learn; counts the others by their reason."""

    max_length: int
    rejected: dict[str, int] = field(default_factory=dict)

    def tokenize(self, items: Iterable[T], encode: Callable[[T], TokenizedExample]) -> list[TokenizedExample]:
        """What `make` makes of each; of those that it cannot make (DataError), too."""
        found = []
        for thing in items:
            try:
                text = encode(thing)
            except DataError as error:
                self.reject(error)
                continue
            if self.accepts(text):
                found.append(text)
        return found

    def accepts(self, *texts: TokenizedExample) -> bool:
        """Whether all of them are taken in; if not, the reason is counted once, for they belong together."""
        if max(len(text) for text in texts) > self.max_length:
            self.reject(f"longer than {self.max_length:,} ids")
        elif not all(text.loss_mask.any() for text in texts):
            self.reject("nothing to learn in it")
        else:
            return True
        return False

    def reject(self, reason: str | DataError) -> None:
        """Counts something that is left out."""
        reason = str(reason).splitlines()[0]
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    @property
    def summary(self) -> str:
        """In words, or nothing."""
        return "; ".join(f"{n:,} left out: {reason}" for reason, n in sorted(self.rejected.items()))
