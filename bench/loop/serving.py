"""Tokens per second of a server that keeps every completion, against the same server when it keeps none.

    python bench/loop/serving.py [--clients 16] [--requests 128] [--tokens 64] [--rounds 24]

`whorl serve --log` runs a model of random weights (17 M parameters). Each round sends all requests, `--clients` at a time,
as streams. In every second round they have `store: true`: the record is sealed, and the last chunk waits until it is on
disk. One process serves both, because two of them choose kernels by their own timings. The ratio is that of the medians; the
log has to have all completions.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse

BAR = 0.98
PROMPT = "def binary_search(items, target):\n"


def write_model(folder: Path, d_model: int, n_layers: int) -> None:
    """Write a model of random weights whose tokens are bytes."""
    from whorl.models import Transformer, save_model
    from whorl.plan.accounting.model_cost import decoder_config
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    config = decoder_config(d_model, n_layers, tokenizer.vocab_size)
    save_model(Transformer(config, generator(0, "bench")).eval(), folder)
    tokenizer.save(folder)


def start(folder: Path, home: Path, *options: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server; return its process and address."""
    from whorl.router.replica_processes import free_port

    port = free_port()
    command = [sys.executable, "-m", "whorl.cli", "serve", str(folder), "--port", str(port), "--name", "m"]
    command += ["--store", str(home), "--kv-cache-memory", "0.5", *options]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL), f"http://127.0.0.1:{port}"


async def run_round(url: str, a: argparse.Namespace, number: int, store: bool) -> float:
    """Return the tokens per second of all requests."""
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        numbers = iter(range(a.requests))
        missing = 0

        async def work() -> None:
            nonlocal missing
            for i in numbers:
                body = {
                    "model": "m", "prompt": f"# {number} {i}\n{PROMPT}", "max_tokens": a.tokens, "ignore_eos": True,
                    "stream": True, "seed": i, "store": store, "user": f"user {i % 50}",
                }  # fmt: skip
                last = ""
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    response.raise_for_status()
                    async for line in response.aiter_lines():
                        last = line if line.startswith("data: {") else last
                missing += store != ('"feedback"' in last)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(a.clients)))
        if missing:
            raise RuntimeError(f"{missing} completions without a token, or with one that should have none")
        return float(a.requests * a.tokens / (time.perf_counter() - began))


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        for name, default in (("clients", 16), ("requests", 128), ("tokens", 64), ("rounds", 24)):
            parser.add_argument(f"--{name}", type=int, default=default)

    smoke = {"clients": 4, "requests": 8, "tokens": 8, "rounds": 2, "d_model": 64, "n_layers": 2}
    a = parse(__doc__, arguments, smoke=smoke, quick={"rounds": 4})
    speeds: dict[bool, list[float]] = {True: [], False: []}
    with tempfile.TemporaryDirectory(prefix="whorl-serving-") as name:
        folder, home = Path(name) / "model", Path(name) / "store"
        write_model(folder, getattr(a, "d_model", 384), getattr(a, "n_layers", 9))
        process, url = start(folder, home, "--log")
        try:
            wait_ready(url)
            for number in range(a.rounds + 1):  # the first one warms up
                for store in (True, False) if number % 2 else (False, True):
                    speed = asyncio.run(run_round(url, a, number, store))
                    if number:
                        speeds[store].append(speed)
                        print(f"round {number}, {store=}: {speed:,.0f} tokens/s", flush=True)
        finally:
            process.terminate()
            process.wait(60)
        n_logged = count_logged(home)
    ours, peer = (statistics.median(speeds[store]) for store in (True, False))
    expected = a.requests * (a.rounds + 1)
    claim(
        "tokens per second of a server that keeps every completion", ours=ours, peer=peer, peer_name="keeping none",
        unit="tokens/s", ratio=ours / peer, bar=BAR, ok=ours >= BAR * peer and n_logged == expected,
        quick=getattr(a, "quick", False),
        samples=[{"kept": speeds[True], "not kept": speeds[False], "logged": n_logged, "expected": expected}],
    )  # fmt: skip


def wait_ready(url: str) -> None:
    """Return once a server is ready."""
    import httpx

    deadline = time.monotonic() + 120
    while True:
        try:
            if httpx.get(f"{url}/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise RuntimeError(f"{url} did not start")
        time.sleep(0.2)


def count_logged(home: Path) -> Any:
    """Return the number of completions in the log of a store."""
    from whorl.log import default_log, open_log
    from whorl.loop.events import COMPLETIONS

    with open_log(default_log(home)) as log:
        return sum(bound.next - bound.first for bound in log.bounds(COMPLETIONS))


if __name__ == "__main__":
    main()
