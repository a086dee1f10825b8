"""Speed of a stream while four clients embed texts without a pause: a stream keeps half of its speed.

    python bench/serve/embeddings_beside_stream.py [--quick]     (--quick: 10 s in place of 60)

A server of a small model runs in a separate process. One client streams completions, alone for a while, and then while
four clients send requests of 20 texts of 1,000 ids each, one after another. A second figure is the longest time
between two tokens of the stream.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import httpx2 as httpx
from bench._run import claim, parse_quick, sized
from bench.serve._servers import Servers, write_model
from bench.serve.attack import NICE, STREAM, wait_until_ready

CLIENTS, TEXTS, IDS = 4, sized(20, 4), 1000
MIN_SPEED = 0.5


async def stream_for(client: httpx.AsyncClient, seconds: float) -> tuple[float, float]:
    """Stream completions, the last one to its end. Returns tokens/s, and the longest time between two tokens."""
    began, n, longest = time.perf_counter(), 0, 0.0
    while time.perf_counter() - began < seconds:
        last = time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    now = time.perf_counter()
                    n, longest, last = n + 1, max(longest, now - last), now
    return n / (time.perf_counter() - began), longest


async def measured(port: int, servers: Servers, seconds: float) -> dict[str, float]:
    embedded = 0

    async def embed(client: httpx.AsyncClient) -> None:
        nonlocal embedded
        body = {"model": "tiny", "input": [[7] * IDS] * TEXTS}
        while True:
            answer = await client.post("/v1/embeddings", json=body)
            assert answer.status_code in (200, 503), answer.text
            embedded += TEXTS * (answer.status_code == 200)

    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=600) as client:
        await wait_until_ready(client, servers)
        await stream_for(client, 0.5)
        alone = [(await stream_for(client, seconds / 12))[0] for _ in range(3)]
        tasks = [asyncio.ensure_future(embed(client)) for _ in range(CLIENTS)]
        await asyncio.sleep(0.1)
        beside, longest = await stream_for(client, seconds)
        for task in tasks:
            task.cancel()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(found, asyncio.CancelledError), found
        return {"alone": statistics.median(alone), "beside": beside, "longest": longest, "texts": embedded}


def main() -> None:
    quick = parse_quick(__doc__)
    seconds = sized(10.0 if quick else 60.0, 1.0)
    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        with Servers.started(Path(name), replicas=1, route=False, key_file=None) as servers:
            os.nice(NICE)
            found = asyncio.run(measured(servers.port, servers, seconds))
    ratio = found["beside"] / found["alone"]
    claim(
        f"speed of a stream beside {CLIENTS} requests of embeddings", ours=found["beside"], peer=found["alone"],
        unit="tokens/s", ratio=ratio, bar=MIN_SPEED, ok=ratio >= MIN_SPEED, samples=[found], quick=quick,
        peer_name="alone",
    )  # fmt: skip


if __name__ == "__main__":
    main()
