"""Models that repeat: reference points which must win no probe.

A language model that is trained too little, or sampled badly, repeats itself. Each of these models prefers a continuation
by a rule of repetition alone. Their scores on the probes are at chance or below; a probe on which one of them is
above chance would measure repetition.

    last        the symbol that occurred most recently
    frequent    the symbol that occurred most often; of equal ones the most recent
    constant    always the same order of preference, without regard to the prompt
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from whorl.evals.model.requests import Missing, Request, Response, Score, ScoreRequest

Preference = Callable[
    [Sequence[str], str], float
]  # (symbols before, next symbol) -> log-probability up to a constant


def _last(before: Sequence[str], symbol: str) -> float:
    return -float(before[::-1].index(symbol)) if symbol in before else -1e3


def _frequent(before: Sequence[str], symbol: str) -> float:
    return 10.0 * before.count(symbol) + _last(before, symbol) / 1e3


def _constant(before: Sequence[str], symbol: str) -> float:
    return -float(int.from_bytes(symbol.encode()[:4].ljust(4, b"\0"), "big")) / 2**32


REPEATERS: Mapping[str, Preference] = {"last": _last, "frequent": _frequent, "constant": _constant}


class RepeatingModel:
    """A `ModelBackend` with one of the rules of `REPEATERS`; one token per symbol."""

    max_length: int | None = None

    def __init__(self, rule: str) -> None:
        self.name = self.address = f"repeats:{rule}"
        self.rule = REPEATERS[rule]

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`."""
        for number, request in enumerate(requests):
            if not isinstance(request, ScoreRequest):
                on_response(number, Missing("a repeating model scores continuations only"))
                continue
            before, values = request.context.split(), list[float]()
            for symbol in request.continuation.split():
                values.append(self.rule(before, symbol))
                before.append(symbol)
            on_response(number, Score(tuple(range(len(values))), tuple(values), greedy=False))
