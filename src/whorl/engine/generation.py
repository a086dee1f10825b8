"""Whole generations on an engine: the bodies of `Engine.stream` and `Engine.generate`.

Among prompts with a common prefix, such as the K completions of a task, one is prefilled first, and the others reuse its
pages (`scheduler.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Protocol

from whorl.engine.config import EngineConfig
from whorl.engine.request import Delta, Generation, Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError

QUEUED = 4  # requests in the engine for each one that runs


class Steps(Protocol):
    """The part of `Engine` that is used here."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def max_positions(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Delta]: ...
    def abort(self, request_id: str) -> bool: ...
    def sequences(self) -> list[Any]: ...


def stream(engine: Steps, requests: Sequence[Request]) -> Iterator[Delta]:
    """Run requests to their ends; see `Engine.stream`."""
    if engine.sequences():
        raise ConfigError(
            "the engine runs other requests, whose deltas would be lost",
            expected="an engine without unfinished requests",
            do="read the earlier stream to its end or close it; to mix requests use add() and step()",
        )
    # Requests of one rank are added as others end, so that a step does not sort thousands of them.
    fed = {(request.priority, request.client) for request in requests}
    limit = QUEUED * engine.config.max_num_seqs if len(fed) == 1 else len(requests)
    running: set[str] = set()
    rest = iter(requests)
    try:
        while True:
            for request in islice(rest, limit - len(running)):
                engine.add(request)
                running.add(request.id)
            if not running:
                return
            for delta in engine.step():
                if delta.request_id not in running:
                    continue
                if delta.finish_reason is not None:
                    running.discard(delta.request_id)
                yield delta
    finally:
        if [engine.abort(request_id) for request_id in running]:
            engine.step()  # takes the deltas of the aborted, so that a later stream may use their ids


def generate(
    engine: Steps,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    first_id: int,
    max_tokens: int,
    forced_prefixes: Sequence[bytes],
    **fields: Any,
) -> list[Generation]:
    """Return completions of `prompts`, in order; see `Engine.generate`. first_id: number in the first request's id."""
    requests = []
    for n, ids in enumerate(prompts):
        if len(ids) >= engine.max_positions:
            raise ConfigError(
                f"prompt {n} has {len(ids):,} ids, and the engine holds {engine.max_positions:,}",
                expected="shorter prompts",
                do="leave it out, or increase the length that the engine is made for",
            )
        one = params if isinstance(params, SamplingParams) else params[n]
        if one is params and one.seed is not None:
            one = one.model_copy(update={"seed": one.seed + n})
        requests.append(
            Request(
                id=f"generate-{first_id + n}",
                ids=tuple(ids),
                sampling=one,
                max_tokens=min(max_tokens, engine.max_positions - len(ids)),
                forced_prefix=forced_prefixes[n] if forced_prefixes else b"",
                **fields,
            )
        )
    completions = {request.id: Generation() for request in requests}
    for delta in stream(engine, requests):
        completion = completions[delta.request_id]
        completion.tokens += delta.tokens
        completion.text += delta.text
        completion.finish_reason = delta.finish_reason
    return list(completions.values())
