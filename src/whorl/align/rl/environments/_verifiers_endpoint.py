"""A local OpenAI-compatible endpoint whose requests wait for replies of the policy.

One endpoint serves all rollouts of an event loop. A request names its rollout in the header X-Session-ID, and is put into
the queue of that rollout. It waits without a limit until `PendingRequest.answer` is called.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

from whorl.evals.episodes.environment import Reply
from whorl.tokens.chat.tool_calls import ParsedReply

_numbers = count()


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits. messages: with texts as contents. tools: JSON schemas."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]]
    future: asyncio.Future[dict[str, Any]] = field(repr=False)

    def answer(self, response: dict[str, Any]) -> None:
        """End the request, unless its sender has left."""
        if not self.future.done():
            self.future.set_result(response)

    def abandon(self) -> None:
        """End the request with an error, because the rollout has ended."""
        self.answer({"error": {"message": "the rollout has ended", "type": "invalid_request_error"}})


class LocalEndpoint:
    """See the top of this file. queues: session -> queue of its requests."""

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, LocalEndpoint]] = WeakKeyDictionary()

    def __init__(self) -> None:
        self.queues: dict[str, asyncio.Queue[Any]] = {}
        self.url, self._users, self._runner = "", 0, None
        self._starting = asyncio.Lock()

    @classmethod
    async def acquire(cls) -> LocalEndpoint:
        """Return the endpoint of the running loop; `release` it."""
        endpoint = cls._of_loop.setdefault(asyncio.get_running_loop(), cls())
        endpoint._users += 1
        async with endpoint._starting:
            if endpoint._runner is None:
                await endpoint._start()
        return endpoint

    async def release(self) -> None:
        """Stop the endpoint after its last user."""
        self._users -= 1
        async with self._starting:
            if not self._users and self._runner is not None:
                runner, self._runner = self._runner, None
                await runner.cleanup()

    async def _start(self) -> None:
        web: Any = importlib.import_module("aiohttp.web")
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _handle(self, request: Any) -> Any:
        web: Any = importlib.import_module("aiohttp.web")
        body, queue = await request.json(), self.queues.get(request.headers.get("X-Session-ID", ""))
        error = ""
        if queue is None:
            error = "the rollout has ended"
        elif body.get("stream"):
            error = "streaming is not supported"
        elif body.get("n", 1) != 1:
            error = "n is not supported"
        if error or queue is None:
            return web.json_response(
                {"error": {"message": error, "type": "invalid_request_error"}}, status=400
            )
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        messages = [{**m, "content": _text(m.get("content"))} for m in body["messages"]]
        queue.put_nowait(PendingRequest(messages, body.get("tools") or (), future))
        response = await future
        return web.json_response(response, status=400 if "error" in response else 200)


def completion(reply: Reply, parsed: ParsedReply) -> dict[str, Any]:
    """Return a reply as a chat completion, with the ids and log-probabilities of the engine."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if parsed.calls:  # ids of calls depend on the row, so a template that shows them gives the same ids again
        named = [
            {**call.message, "id": f"call_{len(reply.prompt_ids)}_{n}"} for n, call in enumerate(parsed.calls)
        ]
        message |= {"content": parsed.text.strip(), "tool_calls": named}
    finish = "tool_calls" if parsed.calls else "stop"
    logprobs = [
        {"token": f"token_id:{i}", "logprob": p, "top_logprobs": []}
        for i, p in zip(reply.ids, reply.log_probs, strict=True)
    ]
    choice = {
        "index": 0, "message": message, "finish_reason": finish if reply.finished else "length",
        "token_ids": list(reply.ids), "logprobs": {"content": logprobs},
    }  # fmt: skip
    used = {"prompt_tokens": len(reply.prompt_ids), "completion_tokens": len(reply.ids)}
    return {
        "id": f"chatcmpl-{next(_numbers)}", "object": "chat.completion", "created": 0, "model": "policy",
        "choices": [choice], "prompt_token_ids": list(reply.prompt_ids),
        "usage": {**used, "total_tokens": sum(used.values())},
    }  # fmt: skip


def _text(content: Any) -> str:
    """Return the text of a message's content. Raises TypeError for pictures and sounds."""
    if content is None or isinstance(content, str):
        return content or ""
    if any(part.get("type") != "text" for part in content):
        raise TypeError("only texts are supported")
    return "".join(part["text"] for part in content)
