"""Converts engine deltas to response fields: text, log-probabilities, usage.

The engine returns bytes, and a character may be split across deltas, so bytes pass through an incremental decoder. Bytes
that are not UTF-8 become U+FFFD in the text and are kept in the `bytes` field of log-probabilities.

With token healing the model generates the end of the prompt again (docs/tokens.md). The engine leaves these bytes out of the
text; here the tokens within them are removed, too.

Log-probabilities are the model's own (`raw_log_prob`), in the two formats of OpenAI. The chat format also has
`sampled_logprob`: the log-probability under the distribution that was sampled from, which training on these tokens needs.
"""

from __future__ import annotations

import asyncio
import codecs
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.engine.request import Alternatives, FinishReason, Token
from whorl.errors import shorten
from whorl.serve.errors import ApiError
from whorl.serve.worker.model_entry import ServedModel
from whorl.serve.worker.worker import Stream
from whorl.tokens.hf_tokenizer import AnyTokenizer
from whorl.tokens.tokenizer import Tokenizer

MAX_TOKENS_PER_DELTA = (
    64  # output that was not read for a while is returned in parts: log-probabilities cost time
)
MIN_LOGPROB = -9999.0  # replaces minus infinity, which JSON cannot represent


@dataclass
class TextDelta:
    """New output of a sequence: text, tokens, and at the end the finish reason.

    prompt_bytes: bytes of the first token that belong to the prompt. end_token: the stop token, which is not in `tokens`.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt_bytes: int = 0
    finish: FinishReason | None = None
    prompt_log_probs: list[float] = field(default_factory=list)
    prompt_alternatives: list[Alternatives] = field(default_factory=list)
    end_token: Token | None = None


class StreamDecoder:
    """Decodes a stream to text, without the forced prefix, which belongs to the prompt."""

    def __init__(self, stream: Stream, tokenizer: AnyTokenizer) -> None:
        self.stream, self.tokenizer = stream, tokenizer
        self._forced_bytes_left = len(stream.request.forced_prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest: TextDelta | None = None  # output that `next` returns later
        self.n_forced = 0  # ids within the forced prefix
        self.texts, self.ids = (
            list[str](),
            list[int](),
        )  # of the whole output so far; ids as the engine sampled them

    async def next(self) -> TextDelta:
        """Wait for new output and return it, at most `MAX_TOKENS_PER_DELTA` tokens; the text comes with the first of them.

        Raises:
            ApiError: 400, the grammar of the request allows no further token; 503, the engine aborted the sequence.
        """
        delta, n = self._rest or await self._next_whole(), MAX_TOKENS_PER_DELTA
        self._rest = None
        if len(delta.tokens) > n:
            self._rest = TextDelta(tokens=delta.tokens[n:], finish=delta.finish)
            delta.tokens, delta.finish = delta.tokens[:n], None
        return delta

    async def _next_whole(self) -> TextDelta:
        delta = await self.stream.next()
        if delta.error:
            grammar = self.stream.request.grammar
            param = "regex" if grammar and grammar.regex else "grammar" if grammar and grammar.lark else None
            text = f"the output cannot continue under the grammar of this request: {shorten(delta.error)}"
            raise ApiError(400, text, param=param, code="grammar_failed")
        if delta.finish_reason == "abort":
            raise ApiError(503, "the engine aborted this request", code="aborted", retry_after=1)
        text = self._decoder.decode(delta.text, final=delta.finish_reason is not None)
        self.texts.append(text)
        self.ids += [token.id for token in delta.tokens]
        self.n_forced += delta.n_forced
        tokens, prompt_bytes = list(delta.tokens[delta.n_forced :]), 0
        for token in delta.tokens[: delta.n_forced]:
            self._forced_bytes_left -= len(_token_bytes(token.id, self.tokenizer))
        if tokens:
            prompt_bytes, self._forced_bytes_left = self._forced_bytes_left, 0
        end_token = None
        if delta.finish_reason == "stop" and tokens and tokens[-1].id in self.stream.request.stop_ids:
            end_token = tokens.pop()  # a stop token is not part of the output
        return TextDelta(
            text,
            tokens,
            prompt_bytes,
            delta.finish_reason,
            list(delta.prompt_log_probs),
            list(delta.prompt_alternatives),
            end_token,
        )

    async def read_all(self) -> TextDelta:
        """Return the full output."""
        texts, full = [], TextDelta()
        while full.finish is None:
            delta = await self._next_whole()
            texts.append(delta.text)
            full.prompt_bytes = full.prompt_bytes or delta.prompt_bytes
            full.tokens += delta.tokens
            full.prompt_log_probs += delta.prompt_log_probs
            full.prompt_alternatives += delta.prompt_alternatives
            full.finish, full.end_token = delta.finish, delta.end_token
        full.text = "".join(texts)
        return full


async def merge_streams(readers: Sequence[StreamDecoder]) -> AsyncIterator[tuple[int, TextDelta]]:
    """Yield (index, delta) of several streams in order of arrival until all have ended."""
    if len(readers) == 1:  # the usual case, without tasks
        finish = None
        while finish is None:
            delta = await readers[0].next()
            finish = delta.finish
            yield 0, delta
        return
    tasks = {asyncio.ensure_future(reader.next()): i for i, reader in enumerate(readers)}
    try:
        while tasks:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                i = tasks.pop(task)
                delta = task.result()
                if delta.finish is None:
                    tasks[asyncio.ensure_future(readers[i].next())] = i
                yield i, delta
    finally:
        for task in tasks:
            task.cancel()


def n_logprobs(output: TextDelta) -> int:
    """Return the number of log-probabilities that an output may show."""
    of_prompt = len(output.prompt_log_probs) + sum(map(len, output.prompt_alternatives))
    return sum(1 + len(token.alternatives) for token in output.tokens) + of_prompt


def response_head(prefix: str, kind: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": None,
    }


def usage(streams: Sequence[Stream], n_prompt: int, best_of: int) -> dict[str, Any]:
    """Return the token counts of one request; each prompt counts once for all its outputs.

    Cached prompt tokens are counted for the first output of each prompt.
    """
    generated = sum(stream.n_tokens for stream in streams)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": generated,
        "total_tokens": n_prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in streams[::best_of])},
    }


def close_all(streams: Sequence[Stream]) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            stream.close()

    return close


def prompt_logprobs(
    ids: Sequence[int], delta: TextDelta, n_top: int, tokenizer: AnyTokenizer
) -> list[dict[str, Any] | None]:
    """Return log-probabilities of a prompt in vLLM's format: for each token, by id, its own and the most likely ones.

    The first token has none. A rank is that among the returned alternatives; that of a less likely token is null.
    """
    scores, found = delta.prompt_log_probs, list[dict[str, Any] | None]()
    found += [None] * (len(ids) - len(scores))
    alternatives = delta.prompt_alternatives or [()] * len(scores)
    for i, p, top in zip(ids[len(found) :], scores, alternatives, strict=True):
        ranks = {other: rank for rank, (other, _) in enumerate(top, 1)}
        found.append({
            str(one): {"logprob": _finite(q), "rank": ranks.get(one), "decoded_token": token_text(one, tokenizer)}
            for one, q in {i: p, **dict(top[:n_top])}.items()
        })  # fmt: skip
    return found


def chat_log_probs(tokens: Sequence[Token], tokenizer: AnyTokenizer, n_top: int) -> list[dict[str, Any]]:
    """Return log-probabilities in the chat format: one entry per token."""
    return [
        {
            **_logprob_entry(token.id, token.raw_log_prob, tokenizer),
            "sampled_logprob": _finite(token.log_prob),
            "top_logprobs": [_logprob_entry(i, p, tokenizer) for i, p in token.alternatives[:n_top]],
        }
        for token in tokens
    ]


_Entry = tuple[int, float | None, dict[str, float] | None]  # id, log-probability, the most likely tokens


class CompletionLogprobs:
    """Log-probabilities in the completions format: parallel lists. Offsets count characters of the output so far."""

    def __init__(self, tokenizer: AnyTokenizer, n_top: int, offset: int = 0) -> None:
        self.tokenizer, self.n_top, self.offset = tokenizer, n_top, offset

    def prompt_logprobs(self, ids: Sequence[int], delta: TextDelta) -> dict[str, Any]:
        """Return the lists of an echoed prompt. The first token has neither a log-probability nor alternatives."""
        entries: list[_Entry] = [(i, None, None) for i in ids[: len(ids) - len(delta.prompt_log_probs)]]
        alternatives = delta.prompt_alternatives or [()] * len(delta.prompt_log_probs)
        scored = zip(ids[len(entries) :], delta.prompt_log_probs, alternatives, strict=True)
        entries += [(i, _finite(p), self._top_logprobs(i, p, top)) for i, p, top in scored]
        return self._lists(entries)

    def output_logprobs(self, tokens: Sequence[Token], prompt_bytes: int = 0) -> dict[str, Any]:
        """Return the lists of new tokens; the first `prompt_bytes` bytes belong to the prompt."""
        out = self._lists(
            [
                (t.id, _finite(t.raw_log_prob), self._top_logprobs(t.id, t.raw_log_prob, t.alternatives))
                for t in tokens
            ]
        )
        if prompt_bytes and tokens:
            raw = _token_bytes(tokens[0].id, self.tokenizer)
            out["tokens"][0] = _text_or_escaped(raw[prompt_bytes:])
            shorter = len(_text_or_escaped(raw)) - len(out["tokens"][0])
            out["text_offset"] = [out["text_offset"][0], *(at - shorter for at in out["text_offset"][1:])]
            self.offset -= shorter
            if out["top_logprobs"]:
                before = raw[:prompt_bytes]
                out["top_logprobs"][0] = {
                    _text_or_escaped(own.removeprefix(before)): p
                    for i, p in _sorted_log_probs(
                        tokens[0].id, tokens[0].raw_log_prob, tokens[0].alternatives[: self.n_top]
                    )
                    if (own := _token_bytes(i, self.tokenizer)).startswith(before)
                }
        return out

    def _top_logprobs(self, chosen: int, log_prob: float, top: Alternatives) -> dict[str, float] | None:
        """Return the most likely tokens and the chosen one, by text (for equal texts the likelier one)."""
        if not self.n_top:
            return None
        every = _sorted_log_probs(chosen, log_prob, top[: self.n_top])
        return {token_text(i, self.tokenizer): p for i, p in every}

    def _lists(self, entries: Sequence[_Entry]) -> dict[str, Any]:
        texts, offsets = [], []
        for i, _, _ in entries:
            texts.append(token_text(i, self.tokenizer))
            offsets.append(self.offset)
            self.offset += len(texts[-1])
        best = [b for _, _, b in entries]
        return {
            "tokens": texts,
            "token_logprobs": [p for _, p, _ in entries],
            "top_logprobs": best if self.n_top else None,
            "text_offset": offsets,
        }


def concat_logprobs(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Concatenate two results of the completions format."""
    return {k: None if first[k] is None else first[k] + second[k] for k in first}


def token_text(i: int, tokenizer: AnyTokenizer) -> str:
    r"""Return a token as the completions format writes it: its text, or "bytes:\xHH..." if it is not UTF-8."""
    return _text_or_escaped(_token_bytes(i, tokenizer))


def _text_or_escaped(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _sorted_log_probs(chosen: int, log_prob: float, top: Alternatives) -> list[tuple[int, float]]:
    """Return the most likely tokens and the chosen one, in ascending order."""
    every = {**dict(top), chosen: log_prob}
    return sorted(((i, _finite(p)) for i, p in every.items()), key=lambda entry: entry[1])


def _token_bytes(i: int, tokenizer: AnyTokenizer) -> bytes:
    """Return the bytes that a token adds to the text; empty for special tokens."""
    ordinary = tokenizer.n_ordinary if isinstance(tokenizer, Tokenizer) else tokenizer.vocab_size
    return tokenizer.token_bytes[i] if i < ordinary else b""


def _logprob_entry(i: int, log_prob: float, tokenizer: AnyTokenizer) -> dict[str, Any]:
    raw = _token_bytes(i, tokenizer)
    name = raw.decode("utf-8", "replace")
    if not raw and isinstance(tokenizer, Tokenizer) and i < tokenizer.vocab_size:
        name = tokenizer.token_bytes[i].decode()  # a special token has a name but no bytes
    return {"token": name, "logprob": _finite(log_prob), "bytes": list(raw)}


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > MIN_LOGPROB else MIN_LOGPROB  # also replaces NaN
