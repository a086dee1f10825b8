"""Answers requests by any OpenAI-compatible endpoint: another engine, a provider, a system of retrieval, model and guard.

    backend = EndpointBackend.open("http://127.0.0.1:8000/v1", "my-model", tokenizer="path/of/the/model")

    generate, text         POST /completions, streamed
    generate, messages     POST /chat/completions, streamed; the endpoint applies its own chat template
    score                  POST /completions with echo and logprobs, of the prompt's ids

With the model's tokenizer, prompts to score are sent as ids: those of `encoding.py`. The endpoint generates one token after
each, so a prompt may be one id shorter than in `EngineBackend`.

Without a tokenizer the text is sent, and the endpoint's own tokens are split where the continuation begins; a token across
the border counts as part of it. Ids are then -1, and texts are scored in one window.

A response that did not arrive in usable form is `Missing` with its reason (`endpoint_client.py`). "model" of an answer must
be the requested one, or a dated version of it.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from whorl.errors import DataError, shorten
from whorl.evals.model.endpoint_client import EndpointClient, Events, Fault
from whorl.evals.model.model_folder import extend_address, hash_folder
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
from whorl.evals.model.windows import strided_windows
from whorl.tokens.token_encoder import TokenEncoder, move_space

DEFAULT_WINDOW = 2048  # of an endpoint that does not state its length
MAX_STATED_LENGTH = 1 << 24
MAX_LOG_PROB = 1e-3  # rounding of another library


class EndpointBackend:
    """A `ModelBackend` over HTTP.

    Attributes:
        name, address, max_length: see `ModelBackend`. client: `n_posted` counts the attempts.

    Args:
        model: name that requests state.
        encoder: of the model's tokenizer; None sends text.
        concurrency: requests at once. extra: further fields of every body, such as {"top_k": 5}; None removes
            a field.
    """

    def __init__(
        self,
        client: EndpointClient,
        model: str,
        address: str,
        *,
        encoder: TokenEncoder | None = None,
        max_length: int | None = None,
        concurrency: int = 16,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.address, self.max_length = model, address, max_length
        self.client, self.encoder, self.concurrency, self.extra = (
            client,
            encoder,
            concurrency,
            dict(extra or {}),
        )

    @classmethod
    def open(
        cls,
        url: str,
        model: str,
        *,
        tokenizer: str | Path | None = None,
        add_bos: bool | None = None,
        max_length: int | None = None,
        concurrency: int = 16,
        extra: Mapping[str, Any] | None = None,
        **client: Any,
    ) -> EndpointBackend:
        """Return a backend. Its only request now is GET /models, for the length.

        Args:
            tokenizer: folder of the model, or of its tokenizer. add_bos: see `TokenEncoder`.
            max_length: positions of a request; default: `max_model_len` of GET /models.
            client: further arguments of `EndpointClient`: timeout, max_retries, api_key_env.

        Raises:
            ConfigError: no URL. DataError: a damaged tokenizer.
        """
        connection = EndpointClient(url, concurrency=concurrency, **client)
        encoder, files = None, ""
        if tokenizer is not None:
            encoder = TokenEncoder.load(Path(tokenizer), add_bos)
            files = hash_folder(Path(tokenizer))
        length = max_length or _stated_length(connection, model)
        key = hashlib.sha256(f"{connection.url}\n{model}".encode()).hexdigest()[:32]
        settings = {"tokenizer": files, "add_bos": encoder.add_bos if encoder else None, "length": length}
        address = extend_address(f"endpoint-{key}", {**settings, "extra": dict(extra or {})})
        return cls(
            connection,
            model,
            address,
            encoder=encoder,
            max_length=length,
            concurrency=concurrency,
            extra=extra,
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each id, for a reader; empty without the model's tokenizer."""
        return self.encoder.token_texts(ids) if self.encoder is not None else []

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`. `on_response` is called in the caller's thread."""
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="whorl-endpoint") as pool:
            numbers: dict[Future[Response], int] = {
                pool.submit(self._respond_one, r): n for n, r in enumerate(requests)
            }
            try:
                for future in as_completed(numbers):
                    on_response(numbers[future], future.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _respond_one(self, request: Request) -> Response:
        try:
            if isinstance(request, GenerateRequest):
                return self._generate(request)
            if isinstance(request, ScoreRequest):
                return self._score(request)
            return self._score_text(request)
        except DataError as error:
            return Missing(str(error))

    # -- generation ----------------------------------------------------------------------------------------------------

    def _generate(self, request: GenerateRequest) -> Response:
        if request.answer_ids:
            return Missing("an endpoint does not continue the beginning of an answer; evaluate a local model")
        plain = isinstance(request.prompt, str)
        prompt = [dict(m) for m in request.prompt if not isinstance(m, str)] if not plain else request.prompt
        body = self._body(
            **{"prompt" if plain else "messages": prompt}, max_tokens=request.max_tokens, stream=True, seed=request.seed,
            temperature=request.temperature, top_p=request.top_p, top_k=request.top_k or None,
            stop=list(request.stop) or None,
        )  # fmt: skip
        path = "/completions" if plain else "/chat/completions"
        return self.client.call(path, body, self._read_completion)

    def _read_completion(self, events: Events) -> Completion:
        text, finish = "", None
        for choice in self._choices(events):
            part = choice.get("delta") or choice.get("message") or {}
            text += str(choice.get("text") or part.get("content") or "")
            finish = choice.get("finish_reason") or finish
        if finish is None:
            raise Fault("the answer ended without a finish reason")
        if finish == "content_filter":
            raise Fault("the endpoint's content filter withheld the answer", retry=False, of_request=True)
        return Completion(text, finish="length" if finish == "length" else "stop")

    def _choices(self, events: Events) -> list[dict[str, Any]]:
        """Return the choices of all events, of the requested model only."""
        out = []
        for event in events:
            named = event.get("model")
            if named and not _is_model(str(named), self.name):
                raise Fault(f"answered as the model {shorten(str(named))!r}, not {self.name!r}")
            out += [choice for choice in event.get("choices") or () if not choice.get("index")]
        if not out:
            raise Fault("the answer has no choices")
        return out

    # -- scores --------------------------------------------------------------------------------------------------------

    def _score(self, request: ScoreRequest) -> Response:
        if self.encoder is None:
            if not isinstance(request.context, str):
                return Missing(
                    "an endpoint scores no conversations without the model's tokenizer; give --tokenizer"
                )
            context, continuation = move_space(request.context, request.continuation)
            return self._score_by_offset(context, continuation)
        [pair] = self.encoder.encode_pairs([(request.context, request.continuation)])
        n, limit = len(pair.continuation), (self.max_length or 1 << 30) - 1
        if not n:
            return Missing("the continuation has no ids of its own")
        if n >= limit:
            return Missing(f"the continuation has {n:,} ids, and the endpoint reads {limit:,} with a context")
        ids = [*pair.context, *pair.continuation][-limit:]
        n_cut = len(pair.context) + n - len(ids)
        return self._score_ids(ids, len(ids) - n, n_cut)

    def _score_text(self, request: TextRequest) -> Response:
        if self.encoder is None:
            return self._score_by_offset("", request.text)
        ids = self.encoder.encode_document(request.text, score_bos=request.score_bos)
        if len(ids) < 2:
            return Missing("the text has no ids")
        limit = (
            self.max_length or DEFAULT_WINDOW
        ) - 2  # a window has one id more, which is only a target, and one sample
        window = min(request.window or limit, limit)
        log_probs: tuple[float, ...] = ()
        greedy = True
        stride = min(request.stride or max(1, window // 2), window)
        for w in strided_windows(len(ids), window, stride):
            part = self._score_ids(ids[w.start : w.stop], w.first - w.start, 0)
            if isinstance(part, Missing):
                return part
            log_probs += part.log_probs
            greedy &= part.greedy
        return Score(tuple(ids[1:]), log_probs, greedy, 1)

    def _score_ids(self, ids: list[int], n_context: int, n_cut: int) -> Score | Missing:
        def read(events: Events) -> Score:
            texts, log_probs, best = self._echoed(events)
            if len(texts) not in (len(ids), len(ids) + 1):
                raise Fault(
                    f"{len(ids)} ids were sent, and {len(texts)} came back with the sample", retry=False
                )
            chosen = slice(n_context, len(ids))
            values, greedy = _check_scores(log_probs[chosen], best[chosen])
            return Score(tuple(ids[chosen]), values, greedy, n_context, n_cut)

        return self.client.call("/completions", self._echo_body(ids), read)

    def _score_by_offset(self, context: str, continuation: str) -> Score | Missing:
        """Score by the endpoint's own tokens; see the top of this file."""
        if not continuation:
            return Missing("the continuation is empty")

        def read(events: Events) -> Score:
            texts, log_probs, best = self._echoed(events)
            usage: dict[str, Any] = next((e["usage"] for e in events if e.get("usage")), {})
            end = max(0, min(int(usage.get("prompt_tokens") or len(texts) - 1), len(texts)))
            start, covered = end, ""
            while start and len(covered) < len(continuation):
                start -= 1
                covered = texts[start] + covered
            if not covered.endswith(continuation):
                raise Fault(
                    "the endpoint's tokens do not spell the continuation; give the model's tokenizer",
                    retry=False, of_request=True,
                )  # fmt: skip
            values, greedy = _check_scores(log_probs[start:end], best[start:end])
            return Score((-1,) * (end - start), values, greedy, start)

        return self.client.call("/completions", self._echo_body(context + continuation), read)

    def _echo_body(self, prompt: str | list[int]) -> dict[str, Any]:
        return self._body(prompt=prompt, max_tokens=1, temperature=0, echo=True, logprobs=1)

    def _body(self, **fields: Any) -> dict[str, Any]:
        """Return the fields of a body; a field of None is left out."""
        every = {"model": self.name, **fields, **self.extra}
        return {name: value for name, value in every.items() if value is not None}

    def _echoed(self, events: Events) -> tuple[list[str], list[Any], list[Any]]:
        """Return texts, log-probabilities and alternatives of all tokens of an answer."""
        [first, *_] = self._choices(events)
        found = first.get("logprobs") or {}
        lists = [found.get(name) for name in ("tokens", "token_logprobs", "top_logprobs")]
        if (
            not all(isinstance(one, list) for one in lists)
            or len({len(one) for one in lists if one is not None}) != 1
        ):
            raise Fault(
                "the endpoint does not return the prompt's log-probabilities (echo, logprobs)", retry=False
            )
        texts, log_probs, best = lists
        return [str(t) for t in texts or ()], list(log_probs or ()), list(best or ())


def _check_scores(log_probs: Sequence[Any], best: Sequence[Any]) -> tuple[tuple[float, ...], bool]:
    """Return log-probabilities, and whether each token is the most likely one."""
    if any(p is None for p in log_probs):
        raise Fault(
            "the first token has no log-probability; give the model's tokenizer, which puts bos before a text",
            retry=False, of_request=True,
        )  # fmt: skip
    values = tuple(float(p) for p in log_probs)
    if not all(math.isfinite(p) and p <= MAX_LOG_PROB for p in values):
        text = "the endpoint returned log-probabilities that are NaN, infinite or positive"
        raise Fault(text, retry=False, of_request=True)
    if not all(best):
        raise Fault("the endpoint returns no alternatives, so greedy answers are unknown", retry=False)
    return values, all(p >= max(top.values()) for p, top in zip(values, best, strict=True))


def _is_model(named: str, requested: str) -> bool:
    """Whether an answer of `named` is one of `requested`: equal, or a dated version such as name-2026-01-31."""
    return named == requested or bool(re.fullmatch(re.escape(requested) + r"-[\d-]{4,10}", named))


def _stated_length(client: EndpointClient, model: str) -> int | None:
    listed = client.get("/models")
    entries = listed.get("data") if isinstance(listed, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("id") == model:
            for name in ("max_model_len", "context_length", "max_context_length"):
                if isinstance(length := entry.get(name), int) and 2 < length <= MAX_STATED_LENGTH:
                    return int(length)
    return None
