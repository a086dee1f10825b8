"""From the engine's deltas to what clients read: text that never breaks a character, log-probabilities, usage.

The engine gives bytes. A character may end in the next delta, so bytes go through an incremental decoder; bytes that are no
text become U+FFFD, as everywhere in JSON, and stand as they are in the `bytes` of log-probabilities.

A healed prompt's last piece is written anew by the model (docs/tokens.md): it is the prompt's, and cut from the answer.

Log-probabilities are the model's own (`raw_log_prob`), in OpenAI's two forms; the chat form also says, as `sampled_logprob`,
the one under the distribution that was sampled from, which is what learning from these tokens needs.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.engine.request import Finish, Token
from whorl.serve.errors import ApiError
from whorl.serve.served import Words
from whorl.serve.worker import Stream

LEAST = -9999.0  # stands for minus infinity, which JSON has no word for


@dataclass
class Piece:
    """What is new: text to be shown, tokens, and at the end the reason."""

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish: Finish | None = None
    prompt_log_probs: list[float] = field(default_factory=list)


class Reader:
    """A stream as text. skip: bytes at its beginning that belong to the prompt."""

    def __init__(self, stream: Stream, skip: int = 0) -> None:
        self.stream, self._skip = stream, skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def next(self) -> Piece:
        """Waits for more.

        Raises:
            ApiError: the engine gave it up.
        """
        delta = await self.stream.next()
        if delta.finish == "abort":
            raise ApiError(503, "the engine gave this request up", code="aborted", retry_after=1)
        cut = min(self._skip, len(delta.text))
        self._skip -= cut
        text = self._decoder.decode(delta.text[cut:], final=delta.finish is not None)
        return Piece(text, list(delta.tokens), delta.finish, list(delta.prompt_log_probs))

    async def rest(self) -> Piece:
        """All of it, as one piece."""
        texts, whole = [], Piece()
        while whole.finish is None:
            piece = await self.next()
            texts.append(piece.text)
            whole.tokens += piece.tokens
            whole.prompt_log_probs += piece.prompt_log_probs
            whole.finish = piece.finish
        whole.text = "".join(texts)
        return whole


async def together(readers: Sequence[Reader]) -> AsyncIterator[tuple[int, Piece]]:
    """(index, piece) of several readers as they come, each to its end."""
    if len(readers) == 1:  # the usual: no tasks
        finish = None
        while finish is None:
            piece = await readers[0].next()
            finish = piece.finish
            yield 0, piece
        return
    tasks = {asyncio.ensure_future(reader.next()): i for i, reader in enumerate(readers)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = tasks.pop(task)
                piece = task.result()
                if piece.finish is None:
                    tasks[asyncio.ensure_future(readers[i].next())] = i
                yield i, piece
    finally:
        for task in tasks:
            task.cancel()


def usage(streams: Sequence[Stream], n_prompt: int, each: int) -> dict[str, Any]:
    """Tokens of one request: each prompt counted once, whatever the number of its answers.

    Tokens of prompts that were found in the cache are those of each prompt's first answer.
    """
    written = sum(stream.n_tokens for stream in streams)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": written,
        "total_tokens": n_prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached for s in streams[::each])},
    }


def chat_log_probs(tokens: Sequence[Token], words: Words) -> list[dict[str, Any]]:
    """The chat form: an entry a token."""
    return [
        {
            **_entry(token.id, token.raw_log_prob, words),
            "sampled_logprob": _finite(token.log_prob),
            "top_logprobs": [_entry(i, p, words) for i, p in token.alternatives],
        }
        for token in tokens
    ]


class Scores:
    """The completions' form: parallel lists, whose offsets count the characters of the answer so far."""

    def __init__(self, words: Words, n: int, offset: int = 0) -> None:
        self.words, self.n, self.offset = words, n, offset

    def prompt(self, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        """Of an echoed prompt: nothing comes before its first token, and alternatives are not known."""
        known: list[float | None] = [None] * (len(ids) - len(log_probs)) + [_finite(p) for p in log_probs]
        return self._lists([(i, p, None) for i, p in zip(ids, known, strict=True)])

    def answer(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """Of new tokens."""
        return self._lists([(t.id, _finite(t.raw_log_prob), self._best(t)) for t in tokens])

    def _best(self, token: Token) -> dict[str, float] | None:
        """The likeliest by text, and the chosen one. Of two that are spelled alike the likelier is told."""
        if not self.n:
            return None
        out: dict[str, float] = {}
        for i, p in sorted((*token.alternatives[: self.n], (token.id, token.raw_log_prob)), key=lambda x: x[1]):
            out[spelled(i, self.words)] = _finite(p)
        return out

    def _lists(self, entries: Sequence[tuple[int, float | None, dict[str, float] | None]]) -> dict[str, Any]:
        texts, offsets = [], []
        for i, _, _ in entries:
            texts.append(spelled(i, self.words))
            offsets.append(self.offset)
            self.offset += len(texts[-1])
        best = [b for _, _, b in entries]
        return {
            "tokens": texts,
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": best if self.n else None,
            "text_offset": offsets,
        }


def joined(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Two of the completions' form, one after the other."""
    return {k: None if first[k] is None else first[k] + then[k] for k in first}


def spelled(i: int, words: Words) -> str:
    """A token as text; where its bytes are no text, U+FFFD stands for them."""
    return _bytes(i, words).decode("utf-8", "replace")


def _bytes(i: int, words: Words) -> bytes:
    return words.token_bytes[i] if i < words.vocab_size else b""


def _entry(i: int, log_prob: float, words: Words) -> dict[str, Any]:
    raw = _bytes(i, words)
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(log_prob), "bytes": list(raw)}


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > LEAST else LEAST  # also for what is no number
