"""Completions that users let the server keep (OpenAI's `store`): the model, the actor, and the record in the log.

`metadata` may have `pair` and `side` ("left" or "right"): two answers of one comparison share a pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request as HttpRequest

from whorl.loop.events import CompletionMade, LoggedAnswer
from whorl.serve.api.protocol import ChatRequest, CompletionRequest, ResponsesRequest
from whorl.serve.api.response_formatting import StreamDecoder
from whorl.serve.app_state import ANONYMOUS, MAX_ACTOR, AppState, actor_of, client_id
from whorl.serve.completion_log import CompletionLog
from whorl.serve.errors import ApiError
from whorl.serve.worker.model_entry import ServedModel


@dataclass
class KeptCompletion:
    """A completion to be logged. digest: of the weights at its start. prompt: set once the request is parsed."""

    events: CompletionLog
    served: ServedModel
    digest: str
    actor: str
    pair: str = ""
    side: str = ""
    arm: str = ""
    prompt: str | list[dict[str, Any]] = ""

    async def append(self, id: str, readers: Sequence[StreamDecoder]) -> dict[str, Any]:
        """Log the completion. Returns the field `feedback` of its response; nothing if the log did not take it."""
        request = readers[0].stream.request
        sampling = request.sampling.model_dump(mode="json", exclude_defaults=True)
        answers = [LoggedAnswer("".join(r.texts), r.ids, str(r.stream.finish), r.n_forced) for r in readers]
        same = self.digest == self.served.weights.digest  # else they changed while it ran
        made = CompletionMade(
            id, self.served.name, self.digest if same else "", self.actor, self.prompt, list(request.ids), answers,
            {**sampling, "max_tokens": request.max_tokens}, self.pair, self.side, self.arm,
        )  # fmt: skip
        found = await self.events.keep(made)
        return {} if found is None else {"feedback": found}


def choose_model(
    state: AppState, body: ChatRequest | CompletionRequest | ResponsesRequest, http: HttpRequest
) -> tuple[ServedModel, KeptCompletion | None]:
    """Return the model that answers a request (or its challenger), and what is logged of it; None without `store`.

    Raises:
        ApiError: 404, no such model; 400, this server has no log, or a field is invalid.
    """
    served, arm = state.generation_model(body.model), ""
    if body.store and state.events is None:
        problem = "this server has no log of completions; start it with `whorl serve --log`"
        raise ApiError(400, f"store: {problem}", param="store")
    if not body.store and state.challenger is None:
        return served, None
    actor = actor_of(http, body.user or getattr(body, "safety_identifier", None))
    metadata = getattr(body, "metadata", None) or {}
    pair, side = metadata.get("pair", ""), metadata.get("side", "")
    if len(pair) > MAX_ACTOR or bool(pair) != (side in ("left", "right")):
        raise ApiError(400, "metadata: pair and side ('left' or 'right') belong together", param="metadata")
    if state.challenger is not None and served is state.models[0]:
        unit = actor if actor != ANONYMOUS else client_id(http)
        arm = state.challenger.arm(unit, pair, side)
        served = state.challenger.model if arm == "challenger" else served
    if not body.store or state.events is None:
        return served, None
    return served, KeptCompletion(state.events, served, served.weights.digest, actor, pair, side, arm)
