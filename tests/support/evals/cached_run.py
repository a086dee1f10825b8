"""A run over a cache of responses that may be killed: `python cached_run.py CACHE LOG N`.

The backend writes the number of each request to LOG before it answers, and takes a millisecond for each answer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from whorl.evals.model.requests import Request, Response, Score, ScoreRequest
from whorl.evals.model.response_cache import CachedBackend, ResponseCache

BATCH = 16


class SlowBackend:
    """Answers with a function of the request."""

    name, address, max_length = "slow", "slow-1", None

    def __init__(self, log: Path, seconds: float = 1e-3) -> None:
        self.log, self.seconds = log, seconds

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        with self.log.open("ab", buffering=0) as log:
            for n, request in enumerate(requests):
                assert isinstance(request, ScoreRequest)
                log.write(f"{request.context}\n".encode())
                time.sleep(self.seconds)
                on_response(n, Score((int(request.context),), (-1 / (1 + int(request.context)),), False))


def make_requests(n: int) -> list[Request]:
    return [ScoreRequest(str(i), "x") for i in range(n)]


def run(cache: Path, log: Path, n: int) -> list[Response | None]:
    out: list[Response | None] = [None] * n
    with ResponseCache(cache, batch=BATCH) as responses:
        CachedBackend(SlowBackend(log), responses).respond(make_requests(n), out.__setitem__)
    return out


if __name__ == "__main__":
    print("begins", flush=True)
    run(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
