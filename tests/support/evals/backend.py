"""A model of tests: a function of the request, with counts of what was sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from whorl.evals.model.requests import Completion, GenerateRequest, Request, Response, Score, ScoreRequest

Answer = Callable[[Request], Response]


class FakeBackend:
    """A `ModelBackend` that answers by a function; `sent` has all requests."""

    name, address, max_length = "fake", "fake-address", 100

    def __init__(self, answer: Answer, address: str = "fake-address") -> None:
        self.answer, self.address = answer, address
        self.sent: list[Request] = []

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        self.sent += requests
        for index in reversed(range(len(requests))):  # responses arrive in any order
            on_response(index, self.answer(requests[index]))


def by_log_prob(table: dict[tuple[str, str], float], default: float = -9.0) -> FakeBackend:
    """Return a model with log p(continuation | context) from a table; one token per three characters."""

    def answer(request: Request) -> Response:
        assert isinstance(request, ScoreRequest)
        total = table.get((request.context, request.continuation), default)
        n = max(1, len(request.continuation.strip()) // 3)
        return Score(tuple(range(n)), (total / n,) * n, greedy=total > -0.1)

    return FakeBackend(answer)


def by_text(answer: Callable[[str], str | Response]) -> FakeBackend:
    """Return a model whose answer is a function of the prompt's text."""

    def respond(request: Request) -> Response:
        assert isinstance(request, GenerateRequest)
        prompt = request.prompt if isinstance(request.prompt, str) else request.prompt[-1]["content"]
        found = answer(prompt)
        return Completion(found) if isinstance(found, str) else found

    return FakeBackend(respond)
