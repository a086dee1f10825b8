"""Token ids of requests, equal to those of lm-evaluation-harness 0.4 for the same tokenizer.

    (context, continuation)     white space at the end of the context moves to the continuation; the whole text is encoded,
                                and the continuation's ids are those behind the number of ids of the context alone
    ("", continuation)          the context is one id: bos, or eos without a bos

Encoding both parts separately gives other ids at the border ("a" + "b" may be one token "ab"), and so other scores: two
evaluators that differ here cannot be compared.

A template that adds <s> adds it to both encodings. A text that begins with the text of <s> gets no second one. A template
that adds a suffix (WordPiece's [SEP]) adds it to the context too, so the slice starts after the suffix's place; the harness
does the same, and models with such templates are not causal.

Tokenizers of Whorl have no template. Their models were trained on documents that begin with bos, so bos is added by default;
`add_bos=False` gives the ids of the harness for the exported folder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from whorl.errors import DataError
from whorl.tokens.hf_tokenizer import HFTokenizer
from whorl.tokens.tokenizer import Tokenizer

AnyTokenizer = Tokenizer | HFTokenizer


@dataclass(frozen=True)
class EncodedPair:
    """Ids of a context and of its continuation; an empty continuation has none."""

    context: list[int]
    continuation: list[int]


class RequestEncoder:
    """Encodes the texts of requests for one model.

    prefix_id: the context of a text without one.

    Args:
        tokenizer: a Whorl or a Hugging Face tokenizer.
        add_bos: whether a text begins with bos; None: as its models are trained (see the top of this file).

    Raises:
        DataError: the tokenizer names neither bos nor eos.
    """

    def __init__(self, tokenizer: AnyTokenizer, add_bos: bool | None = None) -> None:
        self.tokenizer, self.add_bos = tokenizer, True if add_bos is None else add_bos
        prefix = tokenizer.bos_id
        if isinstance(tokenizer, HFTokenizer) and prefix is None:
            prefix = tokenizer.eos_id if tokenizer.eos_id is not None else next(iter(tokenizer.end_ids), None)
        if prefix is None:
            raise DataError(
                "the tokenizer names neither a bos nor an eos token",
                expected="one of them in tokenizer_config.json, as the context of a text without one",
            )
        self.prefix_id: int = prefix
        texts = (
            {i: text for text, i in tokenizer.added_tokens.items()}
            if isinstance(tokenizer, HFTokenizer)
            else {}
        )
        self._prefix_text = texts.get(prefix, "")

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
        begins = [bool(self._prefix_text) and text.startswith(self._prefix_text) for text in distinct]
        if add_special_tokens is not None:
            begins = [False] * len(distinct)
        for group in (False, True):
            own = [text for text, starts in zip(distinct, begins, strict=True) if starts == group]
            out.update(
                zip(own, tokenizer.encode_batch(own, add_special_tokens=add and not group), strict=True)
            )
        return out

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair]:
        """Return the ids of (context, continuation) pairs.

        Raises:
            DataError: a text holds a lone surrogate, which has no bytes.
        """
        moved = [move_space(*pair) for pair in pairs]
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

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id alone; parts of a character are replaced."""
        return [self.tokenizer.decode([i]).decode("utf-8", "replace") for i in ids]

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a text to continue."""
        return self.encode_texts([text])[text] or [self.prefix_id]


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
