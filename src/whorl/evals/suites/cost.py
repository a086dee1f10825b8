"""The size of a suite: what its tasks send to a model. Forecasts and `whorl eval --list` are made from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from whorl.evals.kinds.kind import EvalTask, shown_prompt
from whorl.evals.model.requests import GenerateRequest, Request, ScoreRequest


@dataclass(frozen=True)
class SuiteCost:
    """Sums over the tasks of a suite, of the first round of requests of each item.

    Attributes:
        tasks, items: numbers of them.
        requests: distinct ones of each task.
        read_bytes: of the texts, without the beginning that a text shares with the previous one in sorted order, since
            the engine keeps that in its cache.
        generated_tokens: at most.
    """

    tasks: int = 0
    items: int = 0
    requests: int = 0
    read_bytes: int = 0
    generated_tokens: int = 0


def suite_cost(tasks: Sequence[EvalTask]) -> SuiteCost:
    """Return the size of a suite, from the requests of all its items."""
    n_requests = n_bytes = n_tokens = 0
    for task in tasks:
        requests = [r for item in task.items for r in next(task.kind.steps(item)).requests]
        found = {(_text(r), _tokens(r), getattr(r, "seed", 0)) for r in requests}
        texts = sorted(text for text, *_ in found)
        n_requests += len(found)
        n_tokens += sum(tokens for _, tokens, _ in found)
        n_bytes += sum(len(text.encode()) for text in texts) - sum(_shared(*pair) for pair in pairwise(texts))
    return SuiteCost(len(tasks), sum(len(task.items) for task in tasks), n_requests, n_bytes, n_tokens)


def _shared(first: str, second: str) -> int:
    """Return the number of equal characters at the beginning."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )


def _text(request: Request) -> str:
    if isinstance(request, ScoreRequest):
        return shown_prompt(request.context) + request.continuation
    return shown_prompt(request.prompt) if isinstance(request, GenerateRequest) else request.text


def _tokens(request: Request) -> int:
    return request.max_tokens if isinstance(request, GenerateRequest) else 0
