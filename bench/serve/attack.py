"""The attack corpus against `whorl serve`, in waves of all kinds, while another client streams.

    python bench/serve/attack.py [--seconds 3600] [--replicas 2] [--seed 0] [--scale 1]

A small model of random weights is served on this machine. Each wave sends one attack of every kind (`_attacks.py`), 16 at
once. A greedy control request follows each wave; its text must not change. Four figures are reported:

- requests with a bad answer (status 500 or more without Retry-After, or none), of those tried, refused and answered
- the longest delay of an event loop
- the memory of all processes of the server, before and after
- the speed of the other client's stream, alone and under attack

The client uses the same cores as the server, so delays and speeds on a small machine are partly its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import httpx2 as httpx
import psutil
from bench._run import claim, parse, sized
from bench.serve._attacks import KINDS, Attack, Target, attack
from bench.serve._traffic import Counts, wave

MAX_DELAY, MAX_GROWTH, MIN_SPEED = 0.05, 0.05, 0.5  # seconds, of the memory, of the speed alone
ALONE_SECONDS = sized(5.0, 1.0)
CONTROL = {"model": "tiny", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
STREAM = {"model": "tiny", "prompt": "x = ", "max_tokens": 64, "ignore_eos": True, "stream": True}
GAUGES = ("delay", "own")


@dataclass
class Observed:
    """Figures of one run. speeds: tokens/s of each stream, alone and under attack."""

    counts: Counts = field(default_factory=Counts)
    waves: int = 0
    changed: int = 0  # waves after which the control text differed
    delays: dict[str, float] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)  # after the first wave, and at the end
    alone: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    failed_streams: int = 0


def write_model(folder: Path) -> None:
    """Write a small model of random weights whose tokens are bytes."""
    from whorl.models import Transformer, save_model
    from whorl.plan.cost import decoder_config
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    save_model(Transformer(decoder_config(64, 2, tokenizer.vocab_size), generator(0, "bench")).eval(), folder)
    tokenizer.save(folder)


def start_server(folder: Path, port: int, replicas: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "whorl.cli",
        "serve",
        str(folder),
        "--port",
        str(port),
        "--replicas",
        str(replicas),
    ]
    options = [
        "--name",
        "tiny",
        "--dtype",
        "float32",
        "--threads",
        "1",
        "--max-model-len",
        "1024",
        "--kv-cache-memory",
        "0.05",
    ]
    return subprocess.Popen([*command, *options], stderr=subprocess.DEVNULL)


async def wait_until_ready(client: httpx.AsyncClient, process: subprocess.Popen[bytes]) -> None:
    for _ in range(1200):
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None:
            sys.exit(f"the server ended with code {process.returncode}")
        await asyncio.sleep(0.1)
    sys.exit("the server was not ready within 120 s")


async def control_text(client: httpx.AsyncClient) -> Any:
    return (await client.post("/v1/completions", json=CONTROL)).json()["choices"][0]["text"]


async def stream_forever(client: httpx.AsyncClient, seen: Observed, speeds: list[float]) -> None:
    """Stream completions until cancelled; append the tokens per second of each."""
    while True:
        began, n = time.perf_counter(), 0
        try:
            async with client.stream("POST", "/v1/completions", json=STREAM) as answer:
                async for line in answer.aiter_lines():
                    n += line.startswith("data: {")
        except httpx.TransportError:
            n = 0
        if n < 2:  # refused or lost
            seen.failed_streams += 1
            await asyncio.sleep(0.5)
        speeds.append(STREAM["max_tokens"] / (time.perf_counter() - began) if n >= 2 else 0.0)


async def loop_delays(client: httpx.AsyncClient, replicas: int) -> dict[str, float]:
    """Return the longest delay of any server's event loop, and the part in which its thread computed."""
    urls = [str(client.base_url)]
    if replicas > 1:
        urls += [one["url"] for one in (await client.get("/v1/router/replicas")).json()["replicas"]]
    found = dict.fromkeys(GAUGES, 0.0)
    for url in urls:
        text = (await client.get(f"{url.rstrip('/')}/metrics")).text
        for name in GAUGES:
            values = re.findall(rf"^whorl_\w*event_loop_longest_{name}_seconds (\S+)", text, re.MULTILINE)
            found[name] = max([found[name], *map(float, values)])
    return found


def resident_bytes(server: psutil.Process) -> int:
    return sum(process.memory_info().rss for process in [server, *server.children(recursive=True)])


def wave_of(seed: int, target: Target) -> Iterator[tuple[str, int, Attack]]:
    for kind in KINDS:
        yield kind, seed, attack(kind, seed, target)


async def run(port: int, process: subprocess.Popen[bytes], args: Any) -> Observed:
    seen, target, server = Observed(), Target("tiny", args.scale), psutil.Process(process.pid)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        await wait_until_ready(client, process)
        text = await control_text(client)
        alone = asyncio.create_task(stream_forever(client, seen, seen.alone))
        await asyncio.sleep(ALONE_SECONDS)
        alone.cancel()
        reader = asyncio.create_task(stream_forever(client, seen, seen.attacked))
        deadline = time.monotonic() + args.seconds
        while seen.waves < 2 or time.monotonic() < deadline:
            await wave(port, wave_of(args.seed + seen.waves, target), seen.counts)
            seen.waves += 1
            seen.changed += await control_text(client) != text
            if seen.waves == 1:
                seen.memory.append(resident_bytes(server))
            seen.delays = await loop_delays(client, args.replicas)
            print(
                f"wave {seen.waves}: {seen.counts.tried:,} requests, {len(seen.counts.bad)} bad, longest delay "
                f"{seen.delays['delay'] * 1e3:.0f} ms (own {seen.delays['own'] * 1e3:.0f} ms), "
                f"{resident_bytes(server) / 1e6:,.0f} MB",
                flush=True,
            )
        reader.cancel()
        await asyncio.gather(alone, reader, return_exceptions=True)
        await asyncio.sleep(sized(12.0, 0.5))  # the last sequences end, and the server returns freed memory
        seen.memory.append(resident_bytes(server))
    return seen


def report(seen: Observed, args: Any) -> None:
    counts, (before, after) = seen.counts, seen.memory
    alone, attacked = statistics.median(seen.alone), statistics.median(seen.attacked or [0.0])
    for kind, seed, reason in counts.bad[:20]:
        print(f"bad: {kind} {seed}: {reason[:300]}")
    samples = [
        {
            "waves": seen.waves, "kinds": len(KINDS), "tried": counts.tried, "refused": counts.refused,
            "answered": counts.answered, "server_errors": counts.server_errors, "bad": len(counts.bad),
            "statuses": {str(k): n for k, n in sorted(counts.statuses.items())}, "control_changed": seen.changed,
            "failed_streams": seen.failed_streams, "replicas": args.replicas, "seconds": args.seconds,
        }
    ]  # fmt: skip
    harmless = not counts.bad and not seen.changed
    claim(
        "requests of the attack corpus with a bad answer", ours=len(counts.bad), peer=counts.tried, unit="requests",
        ratio=len(counts.bad), bar=0, ok=harmless, samples=samples, peer_name="requests tried", variant="answers",
    )  # fmt: skip
    claim(
        "longest delay of the server's event loop under attack", ours=seen.delays["delay"], peer=seen.delays["own"],
        unit="s", ratio=seen.delays["delay"], bar=MAX_DELAY, ok=seen.delays["delay"] <= MAX_DELAY, samples=samples,
        peer_name="of it, computed by the loop's thread", variant="delay",
    )  # fmt: skip
    claim(
        "memory of the server's processes after the attack", ours=after / 1e6, peer=before / 1e6, unit="MB",
        ratio=after / before, bar=1 + MAX_GROWTH, ok=after <= before * (1 + MAX_GROWTH), samples=samples,
        peer_name="after the first wave", variant="memory",
    )  # fmt: skip
    claim(
        "speed of another client's stream under attack", ours=attacked, peer=alone, unit="tokens/s",
        ratio=attacked / alone, bar=MIN_SPEED, ok=attacked >= MIN_SPEED * alone, samples=samples,
        peer_name="alone", variant="stream",
    )  # fmt: skip


def main() -> None:
    def add(parser: Any) -> None:
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument("--replicas", type=int, default=1)
        parser.add_argument("--seed", type=int, default=0, help="of the first wave")
        parser.add_argument("--scale", type=float, default=1.0, help="of the largest bodies; 1 is 4 MB")

    args = parse(__doc__, add, smoke={"seconds": 1.0, "scale": 0.02})
    from whorl.router.replica_processes import free_port

    with tempfile.TemporaryDirectory() as name:
        write_model(Path(name))
        port = free_port()
        process = start_server(Path(name), port, args.replicas)
        try:
            seen = asyncio.run(run(port, process, args))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    print(json.dumps({"exit code of the server": code}))
    report(seen, args)


if __name__ == "__main__":
    main()
