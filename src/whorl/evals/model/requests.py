"""Requests to a model under evaluation, and its responses.

Requests are text. The back end tokenizes them, because an endpoint has its own tokenizer. A response is kept in the
cache by (model address, request). So it holds everything that a metric may need later: the log-probability of every
token, not only their sum, and the text as generated, not only the extracted answer.

A response that did not arrive is `Missing` and never a score of 0: results have bounds with all missing responses wrong,
and all of them right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Message = Mapping[str, str]  # role, content
Finish = Literal["stop", "length"]


@dataclass(frozen=True)
class ScoreRequest:
    """Score `continuation` after `context`.

    The text context + continuation is tokenized as a whole; the continuation's ids are those behind the ids of the
    context alone. White space at the end of the context counts as part of the continuation. A context of messages is
    rendered with the model's chat template, up to the start of the reply.
    """

    context: str | tuple[Message, ...]
    continuation: str


@dataclass(frozen=True)
class TextRequest:
    """Score a whole text in windows: each token once, with at least `window - stride` tokens of context where there are.

    window: 0 takes the model's evaluation window, and a larger one than the model reads is reduced. stride: 0 takes half of
    the window. score_bos: score a bos that the tokenizer adds, after another one, as lm-evaluation-harness does.
    """

    text: str
    window: int = 0
    stride: int = 0
    score_bos: bool = False


@dataclass(frozen=True)
class GenerateRequest:
    """Generate one completion.

    prompt: a text to continue, or messages to answer. temperature: 0 is greedy. heal: the last token of a text may be a
    part of a longer one (`tokens/vocabulary.py`); for texts cut inside a line. An endpoint may not do so.
    answer_ids: the beginning of the answer, which a local model continues.
    """

    prompt: str | tuple[Message, ...]
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    heal: bool = False
    answer_ids: tuple[int, ...] = ()
    top_k: int = 0


@dataclass(frozen=True)
class Score:
    """Log-probabilities of a continuation or of a text, in nats.

    ids, log_probs: one for each scored token. greedy: every scored id is the most likely one. n_context: ids before the
    first scored one. n_cut: ids of the context left out at its beginning, because the model reads fewer.
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    greedy: bool
    n_context: int = 0
    n_cut: int = 0

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return sum(self.log_probs)


@dataclass(frozen=True)
class Completion:
    """A generated text without its stop string.

    finish: "length" if the limit cut it. n_cut: ids left out at the beginning of the prompt, because the model reads fewer.
    """

    text: str
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    finish: Finish = "stop"
    n_cut: int = 0


@dataclass(frozen=True)
class Missing:
    """No response: an endpoint that timed out after all retries, NaN log-probabilities, a refused request."""

    reason: str


Request = ScoreRequest | TextRequest | GenerateRequest
Response = Score | Completion | Missing


class ModelBackend(Protocol):
    """Answers requests.

    Attributes:
        name: as the user gave it.
        address: identifies weights and tokenizer (an artifact's address, a hash of a folder, or URL and model name).
        max_length: positions of a request at most, or None if unknown.
    """

    name: str
    address: str
    max_length: int | None

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """Call `on_response` once for each request with its index, in any order, as responses arrive."""
        ...


def responses_of(backend: ModelBackend, requests: Sequence[Request]) -> list[Response]:
    """Return the responses of a back end, in the order of the requests."""
    found: list[Response] = [Missing("the back end gave no response")] * len(requests)
    backend.respond(requests, found.__setitem__)
    return found


class WrappedBackend:
    """The parts that a back end around another one takes from it."""

    def __init__(self, backend: ModelBackend) -> None:
        self.backend = backend
        self.name, self.address, self.max_length = backend.name, backend.address, backend.max_length
        self.tokenizer = getattr(backend, "tokenizer", None)

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id; empty if the back end has none."""
        texts: list[str] = getattr(self.backend, "token_texts", lambda _: [])(ids)
        return texts
