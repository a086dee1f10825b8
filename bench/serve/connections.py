"""Ten thousand open connections to one server: memory per connection, latency, and no failed requests.

    python bench/serve/connections.py [--quick]     (--quick: 1,000)

A server of a small model runs in a separate process. First, one client times a completion. Then N connections are
opened; each sends one health check and stays open. The first client times the same completion again. Last, all N
clients request a completion at the same moment. Each must get an answer, or a 503 with a Retry-After header. No
connection may break, and no page may stay in use.
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
from bench._run import claim, parse_quick, sized

BAR = 2.0  # median latency with N open connections, relative to none
ROUNDS = sized(15, 3)
SERVER = """
import torch
from whorl.engine.config import EngineConfig
from whorl.models import Transformer
from whorl.plan.accounting.model_cost import decoder_config
from whorl.serve.app_state import AppState
from whorl.serve.config import ServeConfig
from whorl.serve.server import bind_socket, run_server
from whorl.serve.worker.model_loading import served_model
from whorl.evals.model.sampling import open_engine
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tokens.chat import ChatTemplate
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.seeds import generator

torch.set_num_threads(1)
words = Tokenizer([bytes([i]) for i in range(256)])
encoder = TokenEncoder(words)
model = Transformer(decoder_config(64, 2, words.vocab_size), generator(0, "bench")).eval()
engine = open_engine(model, EngineConfig(max_model_len=256, kv_cache_tokens=8192), encoder)
state = AppState(ServeConfig(port=0, max_queue=1024), [served_model(["tiny"], encoder, engine)], engine)
run_server(state, bind_socket(state.config), lambda url: print(url, flush=True))
"""
BODY = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}).encode()
COMPLETION = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%s"
)
HEALTH = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n\r\n"
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def send(connection: Connection, request: bytes) -> tuple[int, bytes]:
    """(status, body) of one request on an open connection."""
    reader, writer = connection
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
    )
    return int(head.split()[1]), await reader.readexactly(length)


async def measured(n: int, port: int, server: psutil.Process) -> dict[str, object]:
    """Run all phases. Returns latencies, memory and the answers by status."""
    gate = asyncio.Semaphore(256)  # connections that are opened at once

    async def connect() -> Connection:
        async with gate:
            connection = await asyncio.open_connection("127.0.0.1", port)
            status, _ = await send(connection, HEALTH)
            assert status == 200
            return connection

    async def latency(connection: Connection) -> float:
        began = time.perf_counter()
        status, _ = await send(connection, COMPLETION % (len(BODY), BODY))
        assert status == 200
        return time.perf_counter() - began

    client = await connect()
    await latency(client)
    alone = [await latency(client) for _ in range(ROUNDS)]
    before, began = server.memory_info().rss, time.perf_counter()
    others = await asyncio.gather(*(connect() for _ in range(n)))
    connecting, rss = time.perf_counter() - began, server.memory_info().rss - before
    among = [await latency(client) for _ in range(ROUNDS)]
    began = time.perf_counter()
    answers = await asyncio.gather(*(send(one, COMPLETION % (len(BODY), BODY)) for one in others))
    storm = time.perf_counter() - began
    assert (await send(client, HEALTH))[0] == 200
    status, state = await send(client, b"GET /v1/engine/state HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert status == 200
    for _, writer in (client, *others):
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
    quick = parse_quick(__doc__)
    n = sized(1_000 if quick else 10_000, 40)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n + 100:
        sys.exit(
            f"the limit of open files is {hard:,} and {n + 100:,} are needed: raise ulimit -n, or use --quick"
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
    complete = (
        set(answers) <= {200, 503} and sum(answers.values()) == n and found["pages_used"] == 0 and code == 0
    )
    print(
        f"{n:,} connections in {found['connecting']:.1f} s, {found['bytes_each'] / 1e3:.1f} kB each in the server; "
        f"all at once: {answers} in {found['storm']:.1f} s"
    )
    claim(
        f"latency of a completion with {n:,} open connections; all of them are answered",
        ours=among, peer=alone, unit="s", ratio=among / alone, bar=BAR, ok=among / alone < BAR and complete,
        samples=[found], quick=quick, peer_name="no other connection", variant="latency",
    )  # fmt: skip
    claim(
        f"memory of an open connection, {n:,} open", ours=found["bytes_each"] / 1e3, peer=0.0, unit="kB", ratio=0.0,  # type: ignore[operator]
        bar=0.0, ok=complete, samples=[found], quick=quick, peer_name="none",
    )  # fmt: skip


if __name__ == "__main__":
    main()
