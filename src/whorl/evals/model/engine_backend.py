"""Answers requests by the engine that serves: one prefill for each shared prefix, log-probabilities of continuations.

    backend = EngineBackend.open("quickstart/pretrain")        or a folder of `transformers`
    backend.respond(requests, lambda n, response: ...)

Requests are encoded and added in portions, sorted by their context, so that the choices of one question, and all questions
behind the same examples, find their context in the KV cache (`engine/generation.py`).

A context that is longer than the model reads loses ids at its beginning, as in lm-evaluation-harness: the last
`max_length + 1` ids of context and continuation stay, of which the last one is only a target. `Score.n_cut` counts the ids
left out. A prompt to continue loses as many as `max_tokens` needs, but keeps half of what the model reads: then the answer
has fewer tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from whorl.engine.config import BATCH_BURST, EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Delta
from whorl.engine.request import Request as EngineRequest
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import DataError, WhorlError
from whorl.evals.model.model_folder import ModelFolder, extend_address
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)
from whorl.evals.model.sampling import open_engine
from whorl.evals.model.windows import strided_windows
from whorl.machine.device_probe import probe
from whorl.models import load_model
from whorl.tokens.token_encoder import TokenEncoder

T = TypeVar("T")
R = TypeVar("R")

PORTION = 4096  # requests that are encoded together; an id takes up to 40 bytes as a Python integer
CACHE_POSITIONS = 1 << 15  # of the KV cache: 16 steps; more cost memory and time to allocate
CACHE_MEMORY_FRACTION = 0.25  # of the free memory
BLOCK_SIZE = 8  # positions: prefixes are shared by whole pages
BATCHED_TOKENS = 2048


@dataclass
class _Pending:
    """A request in the engine: one for each window of a text."""

    index: int
    build: Callable[[list[Delta]], Response]
    n_missing: int = 1
    deltas: list[Delta] = field(default_factory=list)
    parts: dict[str, int] = field(default_factory=dict)


class EngineBackend:
    """A `ModelBackend` over an engine.

    Attributes:
        name, address, max_length: see `ModelBackend`.
        engine: its statistics show how many positions were computed.

    Args:
        engine: without unfinished requests.
        encoder: of the engine's model.
        max_length: positions of a request at most; the engine's limit by default.
    """

    def __init__(
        self,
        name: str,
        address: str,
        engine: Engine,
        encoder: TokenEncoder,
        max_length: int | None = None,
    ) -> None:
        self.name, self.address, self.engine, self.encoder = name, address, engine, encoder
        self.tokenizer = encoder.tokenizer
        self.max_length: int | None = min(max_length or engine.max_positions, engine.max_positions)
        self._n_requests = 0

    @classmethod
    def open(
        cls,
        ref: str | Path,
        *,
        store: str | None = None,
        dtype: str = "float32",
        batch_size: int = 64,
        max_length: int | None = None,
        add_bos: bool | None = None,
        batch_invariant: bool = False,
        **engine: Any,
    ) -> EngineBackend:
        """Load an artifact of the store or a folder.

        Args:
            dtype: of the weights: float32 or bfloat16. batch_size: requests that run at once.
            max_length: positions of a request at most; by default what the model's configuration states.
            add_bos: see `TokenEncoder`.
            batch_invariant: scores equal to the bit for any batch and any contents of the cache.
            engine: further fields of `EngineConfig`.

        Raises:
            StoreError, ConfigError: no such model, or an impossible setting. CheckpointError, DataError: damaged files.
        """
        folder = ModelFolder.open(ref, store)
        model = load_model(folder.path, getattr(torch, dtype), probe().device).eval()
        encoder = TokenEncoder.load(folder.path, add_bos)
        length = max_length or model.declared_length
        each = model.kv_bytes_per_token() or 1
        positions = min(batch_size * length, max(CACHE_POSITIONS, 2 * length))
        memory = psutil.virtual_memory()  # the size of the cache decides batches, and so bits
        room = memory.total if torch.are_deterministic_algorithms_enabled() else memory.available
        room = int(room * CACHE_MEMORY_FRACTION) // each
        config = EngineConfig(**{
            "max_num_seqs": batch_size, "max_model_len": length, "block_size": BLOCK_SIZE,
            "kv_cache_tokens": max(length + BLOCK_SIZE, min(positions, room)),
            "max_num_batched_tokens": BATCHED_TOKENS, "max_decode_slowdown": math.inf, "batch_invariant": batch_invariant,
            "decode_burst": BATCH_BURST, **engine,
        })  # fmt: skip
        running = open_engine(model, config, encoder.tokenizer, with_text=None)
        settings = {
            "dtype": dtype,
            "length": length,
            "add_bos": encoder.add_bos,
            "weights": config.weight_dtype or "",
        }
        return cls(
            folder.name, extend_address(folder.address, settings), running, encoder, length,
        )  # fmt: skip

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id, for a reader."""
        return self.encoder.token_texts(ids)

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`. An error of one request is its response; others are answered."""
        order = sorted(range(len(requests)), key=lambda n: _sort_key(requests[n]))
        for start in range(0, len(order), PORTION):
            self._respond_portion(requests, order[start : start + PORTION], on_response)

    def _respond_portion(
        self,
        requests: Sequence[Request],
        numbers: Sequence[int],
        on_response: Callable[[int, Response], None],
    ) -> None:
        engine_requests: list[EngineRequest] = []
        pending: dict[str, _Pending] = {}
        for n, made in self._prepare(requests, numbers):
            if isinstance(made, Missing):
                on_response(n, made)
                continue
            parts, build = made
            one = _Pending(n, build, len(parts))
            for part, request in enumerate(parts):
                engine_requests.append(request)
                pending[request.id] = one
                one.parts[request.id] = part
        for delta in self.engine.stream(engine_requests):
            one = pending[delta.request_id]
            one.deltas.append(delta)
            if delta.finish_reason is None:
                continue
            one.n_missing -= 1
            if not one.n_missing:
                one.deltas.sort(key=lambda d, parts=one.parts: parts[d.request_id])  # type: ignore[misc]
                on_response(one.index, one.build(one.deltas))
                one.deltas = []

    # -- requests to the engine ----------------------------------------------------------------------------------------

    def _prepare(
        self, requests: Sequence[Request], numbers: Sequence[int]
    ) -> Iterator[tuple[int, _Prepared]]:
        """Yield the engine requests of each request, with the function that makes its response; or why there are none."""
        scored = [(n, r) for n in numbers if isinstance(r := requests[n], ScoreRequest)]
        pairs = [(r.context, r.continuation) for _, r in scored]
        try:
            encoded: list[Any] = list(self.encoder.encode_pairs(pairs))
        except DataError:  # one text cannot be encoded: find out which
            encoded = [_or_missing(lambda p: self.encoder.encode_pairs([p])[0], pair) for pair in pairs]
        for (n, _), pair in zip(scored, encoded, strict=True):
            yield n, pair if isinstance(pair, Missing) else self._score(pair.context, pair.continuation)
        for n in numbers:
            request = requests[n]
            if isinstance(request, TextRequest):
                yield n, _or_missing(self._text, request)
            elif isinstance(request, GenerateRequest):
                yield n, _or_missing(self._generate, request)

    def _score(self, context: Sequence[int], continuation: Sequence[int]) -> _Prepared:
        if not continuation:
            return Missing("the continuation has no ids of its own")
        if len(continuation) > self._length:
            return Missing(
                f"the continuation has {len(continuation):,} ids, and the model reads {self._length:,}"
            )
        ids = [*context, *continuation][-(self._length + 1) :]
        n_cut = len(context) + len(continuation) - len(ids)
        n_context = len(context) - n_cut

        def build(deltas: list[Delta]) -> Response:
            return _read_score(deltas, tuple(continuation), n_context, n_cut)

        return [self._request(ids, score_from=n_context)], build

    def _text(self, request: TextRequest) -> _Prepared:
        ids = self.encoder.encode_document(request.text, score_bos=request.score_bos)
        if len(ids) < 2:
            return Missing("the text has no ids")
        window = min(request.window or min(self.engine.model.eval_window, self._length), self._length)
        stride = min(request.stride or max(1, window // 2), window)
        windows = list(strided_windows(len(ids), window, stride))
        parts = [self._request(ids[w.start : w.stop], score_from=w.first - w.start) for w in windows]

        def build(deltas: list[Delta]) -> Response:
            return _read_score(deltas, tuple(ids[1:]), 1, 0)

        return parts, build

    def _generate(self, request: GenerateRequest) -> _Prepared:
        if not self.engine.token_bytes:
            return Missing("the tokenizer does not spell bytes, so no text can be generated")
        stop, stop_ids = tuple(s.encode() for s in request.stop), frozenset(self.encoder.tokenizer.end_ids)
        forced = b""
        if isinstance(request.prompt, str) and request.heal:
            ids, forced, _ = self.encoder.heal(request.prompt)
        elif isinstance(request.prompt, str):
            ids = self.encoder.encode_context(request.prompt)
        else:
            ids = self.encoder.chat.encode_prompt(request.prompt)
            stop, stop_ids = (*stop, *self.encoder.chat.stop), self.encoder.chat.stop_ids
        ids = [*ids, *request.answer_ids]
        room = max(self._length - len(ids), self._length // 2, 1)
        max_tokens = min(request.max_tokens, room)
        kept = ids[-(self._length - max_tokens) :]
        sampling = SamplingParams(
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k, seed=request.seed
        )
        made = self._request(
            kept, sampling=sampling, max_tokens=max_tokens, stop=stop, stop_ids=stop_ids, forced_prefix=forced
        )
        return [made], partial(_read_completion, n_cut=len(ids) - len(kept))

    @property
    def _length(self) -> int:
        return self.max_length or self.engine.max_positions

    def _request(self, ids: Sequence[int], **fields: Any) -> EngineRequest:
        self._n_requests += 1
        return EngineRequest(id=f"eval-{self._n_requests}", ids=tuple(ids), **fields)


_Prepared = Missing | tuple[list[EngineRequest], Callable[[list[Delta]], Response]]


def _or_missing(work: Callable[[T], R], argument: T) -> R | Missing:
    try:
        return work(argument)
    except WhorlError as error:
        return Missing(str(error))


def _read_score(deltas: Sequence[Delta], ids: tuple[int, ...], n_context: int, n_cut: int) -> Response:
    log_probs = tuple(p for delta in deltas for p in delta.prompt_log_probs)
    if len(log_probs) != len(ids):
        return Missing("the engine aborted the request")
    if any(math.isnan(p) for p in log_probs):
        return Missing("the model returned NaN log-probabilities")
    greedy = all(flag for delta in deltas for flag in delta.prompt_greedy)
    return Score(ids, log_probs, greedy, n_context, n_cut)


def _read_completion(deltas: Sequence[Delta], n_cut: int) -> Response:
    finish = deltas[-1].finish_reason
    if finish == "abort" or finish is None:
        return Missing(deltas[-1].error or "the model returned logits that are not finite")
    tokens = [token for delta in deltas for token in delta.tokens]
    text = b"".join(delta.text for delta in deltas).decode("utf-8", "replace")
    ids, log_probs = tuple(t.id for t in tokens), tuple(t.raw_log_prob for t in tokens)
    return Completion(text, ids, log_probs, finish, n_cut)


def _sort_key(request: Request) -> str:
    if isinstance(request, TextRequest):
        return request.text
    text = request.context if isinstance(request, ScoreRequest) else request.prompt
    return text if isinstance(text, str) else repr(text)
