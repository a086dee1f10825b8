"""Ten thousand clients at one server: what their open connections cost, and that every one of them is answered.

A server of a small model runs in a process of its own. First a completion is timed while nobody else is there; then N
connections are opened, each asks once how the server is and stays open, and the same completion is timed among them;
last, all N ask for a completion at the same moment. Each must get an answer, or a 503 that says when to come back: no
connection may break, and no page may be lost.

.venv/bin/python bench/serve/connections.py [--quick]     (--quick: 1,000)
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
import psutil
from bench._run import claim

BAR = 2.0  # times the median latency, with everybody's connections open
ROUNDS = 15
SERVER = """
import torch
from whorl.engine.config import EngineConfig
from whorl.models import Decoder
from whorl.plan.cost import shape
from whorl.runs.seeds import generator
from whorl.serve.api import Api
from whorl.serve.config import ServeConfig
from whorl.serve.load import make_engine, served
from whorl.serve.run import listen, serve
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.tokenizer import Tokenizer

torch.set_num_threads(1)
words = Tokenizer([bytes([i]) for i in range(256)])
chat = ChatTemplate(words)
model = Decoder(shape(64, 2, words.vocab_size), generator(0, "bench")).eval()
engine = make_engine(model, words, chat, EngineConfig(max_length=256, cache_tokens=8192))
api = Api(ServeConfig(port=0, max_queue=1024), [served(["tiny"], words, chat, engine)], engine)
serve(api, listen(api.config), lambda url: print(url, flush=True))
"""
BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}).encode()
ASK = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"
WELL = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ask(ends: Ends, request: bytes) -> tuple[int, bytes]:
    """(status, body) of one request on an open connection."""
    reader, writer = ends
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


async def measured(n: int, port: int, server: psutil.Process) -> dict[str, object]:
    """All of it."""
    gate = asyncio.Semaphore(256)  # that connect at once

    async def connect() -> Ends:
        async with gate:
            ends = await asyncio.open_connection("127.0.0.1", port)
            status, _ = await ask(ends, WELL)
            assert status == 200
            return ends

    async def latency(ends: Ends) -> float:
        began = time.perf_counter()
        status, _ = await ask(ends, ASK % (len(BODY), BODY))
        assert status == 200
        return time.perf_counter() - began

    mine = await connect()
    await latency(mine)
    alone = [await latency(mine) for _ in range(ROUNDS)]
    before, began = server.memory_info().rss, time.perf_counter()
    others = await asyncio.gather(*(connect() for _ in range(n)))
    connecting, rss = time.perf_counter() - began, server.memory_info().rss - before
    among = [await latency(mine) for _ in range(ROUNDS)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(one, ASK % (len(BODY), BODY)) for one in others))
    storm = time.perf_counter() - began
    assert (await ask(mine, WELL))[0] == 200
    status, state = await ask(mine, b"GET /v1/engine/state HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert status == 200
    for _, writer in (mine, *others):
        writer.close()
    return {
        "alone": alone,
        "among": among,
        "connecting": connecting,
        "bytes_each": rss / n,
        "storm": storm,
        "answers": dict(Counter(status for status, _ in answers)),
        "pages_used": json.loads(state)["pages"]["used"],
    }


def main() -> None:
    quick = "--quick" in sys.argv
    n = 1_000 if quick else 10_000
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n + 100:
        sys.exit(
            f"this shell may open {hard:,} files and {n + 100:,} are needed: raise ulimit -n, or use --quick"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        found = asyncio.run(measured(n, port, psutil.Process(process.pid)))
    finally:
        process.terminate()
        code = process.wait(60)
    answers = found["answers"]
    assert isinstance(answers, dict)
    alone, among = (statistics.median(found[k]) for k in ("alone", "among"))  # type: ignore[arg-type]
    whole = (
        set(answers) <= {200, 503} and sum(answers.values()) == n and found["pages_used"] == 0 and code == 0
    )
    print(
        f"{n:,} connections in {found['connecting']:.1f} s, {found['bytes_each'] / 1e3:.1f} kB each in the server; "
        f"all at once: {answers} in {found['storm']:.1f} s"
    )
    claim(
        f"a completion among {n:,} open connections against alone, and all of them answered at once",
        ours=among, peer=alone, unit="s", ratio=among / alone, bar=BAR, ok=among / alone < BAR and whole,
        samples=[found], quick=quick,
    )  # fmt: skip


if __name__ == "__main__":
    main()
