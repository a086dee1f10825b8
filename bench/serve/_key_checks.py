"""Two checks of a server with API keys under attack: a revoked key ends its stream, and a limit is exact over replicas.

seconds = await seconds_until_revoked(client, file)       from the revocation to the end of a running stream
limit = await use_up_limit(client, file, seconds)         accepted requests, and how many the limit allows
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2 as httpx

from whorl.serve.middleware.auth import RELOAD_SECONDS, KeyFile

LONG = {"model": "tiny", "prompt": "x", "max_tokens": 900, "n": 8, "ignore_eos": True, "stream": True}
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 1, "ignore_eos": True}
PER_MINUTE = 120
CLIENTS = 4


def authorization(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def seconds_until_revoked(client: httpx.AsyncClient, file: KeyFile) -> float | None:
    """Revoke a key while its stream runs. Returns None if the stream was refused, or ended before."""
    key, revoked = file.add("revoked"), 0.0
    await asyncio.sleep(2 * RELOAD_SECONDS)  # until all servers have read the key
    try:
        async with client.stream("POST", "/v1/completions", json=LONG, headers=authorization(key)) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and not revoked:
                    file.revoke("revoked")
                    revoked = time.monotonic()
                if revoked and '"invalid_api_key"' in line:
                    return time.monotonic() - revoked
    finally:
        if not revoked:
            file.revoke("revoked")
    return None


@dataclass
class UsedLimit:
    """Answers to a client that sends all the time with a key of `PER_MINUTE` requests."""

    statuses: Counter[int] = field(default_factory=Counter)
    no_retry_after: int = 0  # answers of 429 without that header
    others: list[str] = field(default_factory=list)  # the first answers that are neither 200, 429 nor 503
    seconds: float = 0.0

    @property
    def allowed(self) -> float:
        """A full bucket, and what flows in."""
        return PER_MINUTE * (1 + self.seconds / 60)

    @property
    def ratio(self) -> float:
        return self.statuses[200] / self.allowed


async def use_up_limit(client: httpx.AsyncClient, file: KeyFile, seconds: float) -> UsedLimit:
    """Send requests of one new key from several clients at once, more than its limit, for some seconds."""
    used, headers = UsedLimit(), authorization(file.add("counted", requests_per_minute=PER_MINUTE))
    await asyncio.sleep(2 * RELOAD_SECONDS)  # until all servers have read the key
    began = time.monotonic()

    async def send() -> None:
        while time.monotonic() < began + seconds:
            answer = await client.post("/v1/completions", json=SHORT, headers=headers)
            used.statuses[answer.status_code] += 1
            if answer.status_code not in (200, 429, 503) and len(used.others) < 5:
                used.others.append(f"{answer.status_code} {answer.text[:200]}")
            if answer.status_code == 429:
                used.no_retry_after += "retry-after" not in answer.headers
                await asyncio.sleep(0.1)

    await asyncio.gather(*(send() for _ in range(CLIENTS)))
    used.seconds = time.monotonic() - began
    file.revoke("counted")
    return used
