"""Raters with a known preference, who use a running server as people do: request two answers, and vote.

A share of the raters is random. The others prefer by a `KnownPreference` and are wrong now and then. An error favours the
answer on the left: with `left` = 0.6 and `wrong` = 0.15 the error rate is 18 % where the right answer is the better one, and
12 % where the left one is. Every rater is an actor.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx

from whorl.errors import WhorlError
from whorl.log.event import new_id
from whorl.loop.known_preferences import known_preference

CONCURRENT, TRIES = 16, 6


class ServerRefusedError(WhorlError):
    """The server does not answer as a server with a log does."""


class RaterConfig(NamedTuple):
    """wrong: mean error rate. left: share of errors for the left answer. random: share of raters. thumbs: no pairs."""

    preference: str
    raters: int = 300
    votes: int = 1000
    wrong: float = 0.15
    left: float = 0.6
    random: float = 0.1
    thumbs: bool = False
    model: str = ""
    seed: int = 0


def compare_answers(scores: list[float], is_random: bool, config: RaterConfig, rng: random.Random) -> int:
    """Return 0 for the left answer, 1 for the right one, 2 for a tie. scores: of both."""
    if is_random:
        return int(rng.random() >= config.left)
    if scores[0] == scores[1]:
        return 2
    better = int(scores[1] > scores[0])
    error = 2 * config.wrong * (config.left if better == 1 else 1 - config.left)
    return 1 - better if rng.random() < error else better


class Simulation:
    """The session of all raters. counts: kind of vote, "as preferred", "refused" and "retried" -> number.

    on_votes: called with the number of votes that are done.

    Raises:
        ConfigError: no such preference. ServerRefusedError: from `run`, no such server, or it keeps no completions.
    """

    def __init__(self, url: str, config: RaterConfig, on_votes: Callable[[int], object]) -> None:
        self.url, self.config, self.on_votes = url.rstrip("/"), config, on_votes
        self.known, self.counts = known_preference(config.preference), Counter[str]()
        self.prompts = self.known.prompts(config.seed)

    async def run(self) -> None:
        """Vote until all votes are done."""
        each = 2 if self.config.thumbs else 1
        numbers = iter(range(-(-self.config.votes // each)))
        async with httpx.AsyncClient(base_url=self.url, timeout=120) as self.client:
            model = self.config.model or (await self._send("GET", "/v1/models")).json()["data"][0]["id"]

            async def work() -> None:
                for number in numbers:
                    await self._rate(number, model)
                    self.on_votes(each)

            await asyncio.gather(*(work() for _ in range(CONCURRENT)))

    async def _rate(self, number: int, model: str) -> None:
        """Request two answers to a prompt, and vote."""
        config, rng = self.config, random.Random(f"{self.config.seed} {number}")
        rater = rng.randrange(config.raters)
        is_random, actor = rater < config.random * config.raters, f"simulated-{config.seed}-{rater}"
        prompt, texts, tokens = self.prompts[number % len(self.prompts)], list[str](), list[str]()
        for side in ("left", "right"):
            body = {"model": model, "prompt": prompt, "max_tokens": self.known.max_tokens, "temperature": 1.0,
                    "seed": rng.randrange(2**31), "store": True}  # fmt: skip
            if not config.thumbs:
                body["metadata"] = {"pair": f"{config.seed}-{number}", "side": side}
            found = (await self._send("POST", "/v1/completions", body, actor)).json()
            if "feedback" not in found:
                raise ServerRefusedError(
                    f"{self.url} keeps no completions: an answer without a feedback token",
                    do="start the server with --log",
                )
            texts.append(found["choices"][0]["text"])
            tokens.append(found["feedback"]["token"])
        scores = await asyncio.to_thread(self.known.scores, [prompt] * 2, texts)
        if config.thumbs:
            for token, score in zip(tokens, scores, strict=True):
                good = score >= self.known.good
                liked = rng.random() < 0.5 if is_random else good != (rng.random() < config.wrong)
                await self._vote(
                    {"token": token, "kind": "like" if liked else "dislike"}, actor, liked == good
                )
            return
        best = compare_answers(scores, is_random, config, rng)
        vote = {
            "token": tokens[best % 2],
            "kind": "tie" if best == 2 else "better",
            "over": tokens[1 - best % 2],
        }
        await self._vote(vote, actor, best == 2 or scores[best] > scores[1 - best])

    async def _vote(self, body: dict[str, Any], actor: str, is_right: bool) -> None:
        """Send a vote; every attempt has the same id."""
        try:
            await self._send("POST", "/v1/feedback", body | {"id": new_id(), "via": "simulated"}, actor)
            self.counts.update({body["kind"]: 1, "as preferred": is_right})
        except ServerRefusedError:
            self.counts["refused"] += 1
            if self.counts["refused"] >= 20 and not self.counts["as preferred"]:
                raise

    async def _send(self, method: str, path: str, body: Any = None, actor: str = "") -> httpx.Response:
        """Send a request until the server answers. Raises ServerRefusedError."""
        headers, problem = {"X-Whorl-Actor": actor} if actor else {}, ""
        for attempt in range(TRIES):
            self.counts["retried"] += bool(attempt)
            wait = 0.1 * 2**attempt
            try:
                found = await self.client.request(method, path, json=body, headers=headers)
                if found.status_code < 400:
                    return found
                problem = f"{found.status_code} {found.text[:200]}"
                if found.status_code not in (429, 500, 502, 503, 504):
                    break
                wait = float(found.headers.get("retry-after", wait))
            except httpx.TransportError as error:
                problem = f"{type(error).__name__} {error}"
            await asyncio.sleep(wait)
        raise ServerRefusedError(
            f"{method} {self.url}{path}: {problem}", do="check the address, and the server"
        )
