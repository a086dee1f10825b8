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
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from whorl.engine.request import FinishReason, Token
from whorl.serve.api.protocol import GenerationRequest
from whorl.serve.errors import ApiError
from whorl.serve.worker.model_entry import AnyTokenizer, ServedModel
from whorl.serve.worker.worker import Stream
from whorl.tokens.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON has no word for


@dataclass
class TextDelta:
    """What is new: text to be shown, tokens, and at the end the reason.

    lead: bytes of the first token that belong to the prompt.
    """

    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    prompt_bytes: int = 0
    finish: FinishReason | None = None
    prompt_log_probs: list[float] = field(default_factory=list)


class StreamDecoder:
    """A stream as text. What its output must begin with (`required`) is the prompt's, and is left out."""

    def __init__(self, stream: Stream, tokenizer: AnyTokenizer) -> None:
        self.stream, self.tokenizer = stream, tokenizer
        self._skip_bytes = self._skip_token_bytes = len(stream.request.forced_prefix)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    async def next(self) -> TextDelta:
        """Waits for more.

        Raises:
            ApiError: the engine gave it up.
        """
        delta = await self.stream.next()
        if delta.finish_reason == "abort":
            raise ApiError(503, "the engine gave this request up", code="aborted", retry_after=1)
        cut = min(self._skip_bytes, len(delta.text))
        self._skip_bytes -= cut
        text = self._decoder.decode(delta.text[cut:], final=delta.finish_reason is not None)
        tokens, lead = list(delta.tokens), 0
        while tokens and self._skip_token_bytes:
            size = len(_token_bytes(tokens[0].id, self.tokenizer))
            if size > self._skip_token_bytes:
                lead, self._skip_token_bytes = self._skip_token_bytes, 0
                break
            self._skip_token_bytes -= size
            del tokens[0]
        if delta.finish_reason == "stop" and tokens and tokens[-1].id in self.stream.request.stop_ids:
            del tokens[-1]  # it ended the text and is no part of it
        return TextDelta(text, tokens, lead, delta.finish_reason, list(delta.prompt_log_probs))

    async def read_all(self) -> TextDelta:
        """All of it, as one piece."""
        texts, whole = [], TextDelta()
        while whole.finish is None:
            piece = await self.next()
            texts.append(piece.text)
            whole.prompt_bytes = whole.prompt_bytes or piece.prompt_bytes
            whole.tokens += piece.tokens
            whole.prompt_log_probs += piece.prompt_log_probs
            whole.finish = piece.finish
        whole.text = "".join(texts)
        return whole


async def merge_streams(readers: Sequence[StreamDecoder]) -> AsyncIterator[tuple[int, TextDelta]]:
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


def response_head(prefix: str, kind: str, served: ServedModel) -> dict[str, Any]:
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": served.name,
        "system_fingerprint": None,
    }


def usage(streams: Sequence[Stream], n_prompt: int, best_of: int) -> dict[str, Any]:
    """Tokens of one request: each prompt counted once, whatever the number of its answers.

    Tokens of prompts that were found in the cache are those of each prompt's first answer.
    """
    written = sum(stream.n_tokens for stream in streams)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": written,
        "total_tokens": n_prompt + written,
        "prompt_tokens_details": {"cached_tokens": sum(s.cached_tokens for s in streams[::best_of])},
    }


def usage_field(body: GenerationRequest) -> dict[str, Any]:
    """What every chunk but the last says of usage, where it was asked for."""
    wanted = body.stream_options is not None and body.stream_options.include_usage
    return {"usage": None} if wanted else {}


def close_all(streams: Sequence[Stream]) -> Callable[[], None]:
    def close() -> None:
        for stream in streams:
            stream.close()

    return close


def chat_log_probs(tokens: Sequence[Token], tokenizer: AnyTokenizer) -> list[dict[str, Any]]:
    """The chat form: an entry a token."""
    return [
        {
            **_logprob_entry(token.id, token.raw_log_prob, tokenizer),
            "sampled_logprob": _finite(token.log_prob),
            "top_logprobs": [_logprob_entry(i, p, tokenizer) for i, p in token.alternatives],
        }
        for token in tokens
    ]


class CompletionLogprobs:
    """The completions' form: parallel lists, whose offsets count the characters of the answer so far."""

    def __init__(self, tokenizer: AnyTokenizer, n_top: int, offset: int = 0) -> None:
        self.tokenizer, self.n_top, self.offset = tokenizer, n_top, offset

    def prompt_logprobs(self, ids: Sequence[int], log_probs: Sequence[float]) -> dict[str, Any]:
        """Of an echoed prompt: nothing comes before its first token, and alternatives are not known."""
        known: list[float | None] = [None] * (len(ids) - len(log_probs)) + [_finite(p) for p in log_probs]
        return self._lists([(i, p, None) for i, p in zip(ids, known, strict=True)])

    def output_logprobs(self, tokens: Sequence[Token], prompt_bytes: int = 0) -> dict[str, Any]:
        """Of new tokens; `lead` bytes of the first are the prompt's."""
        out = self._lists([(t.id, _finite(t.raw_log_prob), self._top_logprobs(t)) for t in tokens])
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
                    for i, p in _sorted_log_probs(tokens[0], self.n_top)
                    if (own := _token_bytes(i, self.tokenizer)).startswith(before)
                }
        return out

    def _top_logprobs(self, token: Token) -> dict[str, float] | None:
        """The likeliest by text, and the chosen one. Of two that are spelled alike the likelier is told."""
        if not self.n_top:
            return None
        return {token_text(i, self.tokenizer): p for i, p in _sorted_log_probs(token, self.n_top)}

    def _lists(self, entries: Sequence[tuple[int, float | None, dict[str, float] | None]]) -> dict[str, Any]:
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
    """Two of the completions' form, one after the other."""
    return {k: None if first[k] is None else first[k] + second[k] for k in first}


def token_text(i: int, tokenizer: AnyTokenizer) -> str:
    """A token as completions write it: its text, or where it is none "bytes:" and each byte as backslash, x, two digits."""
    return _text_or_escaped(_token_bytes(i, tokenizer))


def _text_or_escaped(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _sorted_log_probs(token: Token, n: int) -> list[tuple[int, float]]:
    """The n likeliest and the chosen one, the likeliest last."""
    every = {**dict(token.alternatives[:n]), token.id: token.raw_log_prob}
    return sorted(((i, _finite(p)) for i, p in every.items()), key=lambda entry: entry[1])


def _token_bytes(i: int, tokenizer: AnyTokenizer) -> bytes:
    """What a token adds to the text: nothing, if it is a special one."""
    ordinary = tokenizer.n_ordinary if isinstance(tokenizer, Tokenizer) else tokenizer.vocab_size
    return tokenizer.token_bytes[i] if i < ordinary else b""


def _logprob_entry(i: int, log_prob: float, tokenizer: AnyTokenizer) -> dict[str, Any]:
    raw = _token_bytes(i, tokenizer)
    name = raw.decode("utf-8", "replace")
    if not raw and isinstance(tokenizer, Tokenizer) and i < tokenizer.vocab_size:
        name = tokenizer.token_bytes[i].decode()  # a special token has a name, and no bytes
    return {"token": name, "logprob": _finite(log_prob), "bytes": list(raw)}


def _finite(log_prob: float) -> float:
    return log_prob if log_prob > MIN_LOGPROB else MIN_LOGPROB  # also for what is no number
