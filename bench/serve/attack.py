"""The attack corpus against `whorl serve`, in waves of all kinds, while other clients work.

    python bench/serve/attack.py --quick     # 18 seconds
    python bench/serve/attack.py [--seconds 3600] [--replicas 2] [--route] [--keys] [--seed 0] [--scale 1]

A small model of random weights is served on this machine. Each wave sends one attack of every kind (`_attacks.py`), 16 at
once. A greedy control request follows each wave; its text must not change. Figures:

- requests with a bad answer (status 500 or more without Retry-After, or none), of those tried, refused and answered
- the longest delay of an event loop
- the memory of all processes of the server, after three waves and at the end, and of each process over the waves. The
  first waves start the processes that compile grammars, and fill the KV cache.
- the speed of the other client's stream, alone and under attack
- with `--keys`: attacks have no key, a wrong one, or one of small limits. A key is revoked during a stream in each wave, and
  another sends more than its limit (`_key_checks.py`)

`--route` starts the servers alone and gives their addresses to `whorl route`. The attacker and the other clients
run at lower priority than the server (nice 10), so that their own work disturbs it less. They still use the same
cores, which adds to delays and lowers speeds on a small machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import httpx2 as httpx
from bench._run import claim, parse, sized
from bench.serve._attacks import KINDS, Target, one_of_each, targets_with_keys
from bench.serve._key_checks import UsedLimit, authorization, seconds_until_revoked, use_up_limit
from bench.serve._servers import Servers, write_model
from bench.serve._traffic import Counts, wave

MAX_DELAY, MAX_GROWTH, MIN_SPEED = 0.05, 0.05, 0.5  # seconds, of the memory, of the speed alone
MAX_REVOKED, MAX_OFF_LIMIT = 1.0, 0.05  # seconds, of the limit
WARM_WAVES = 3
NICE = 10
ALONE_SECONDS = sized(5.0, 1.0)
LIMIT_SECONDS = sized(60.0, 1.0)
CONTROL = {"model": "tiny", "prompt": "def f(", "max_tokens": 32, "temperature": 0, "ignore_eos": True}
STREAM = {"model": "tiny", "prompt": "x = ", "max_tokens": 64, "ignore_eos": True, "stream": True}
GAUGES = ("delay", "own")


Delays = dict[
    str, tuple[float, str]
]  # of each gauge: the longest since the start in seconds, and the process


@dataclass
class Observed:
    """Figures of one run. speeds: tokens/s of each stream, alone and under attack."""

    counts: Counts = field(default_factory=Counts)
    waves: int = 0
    changed: int = 0  # waves after which the control text differed
    delays: Delays = field(default_factory=dict)
    delays_before: Delays = field(default_factory=dict)  # when the attack begins
    memory: list[int] = field(default_factory=list)  # after the first waves, and at the end
    alone: list[float] = field(default_factory=list)
    attacked: list[float] = field(default_factory=list)
    failed_streams: int = 0
    revoked: list[float] = field(default_factory=list)  # seconds until a stream ended
    limit: UsedLimit | None = None


@dataclass(frozen=True)
class Keys:
    """The key file of the server, the key of harmless clients, and that of the attacker."""

    file: Any
    own: str
    limited: str

    @staticmethod
    def made(path: Path) -> Keys:
        from whorl.serve.middleware.auth import KeyFile

        file = KeyFile(path)
        return Keys(
            file, file.add("own"), file.add("attacker", requests_per_minute=60, tokens_per_minute=50_000)
        )


async def wait_until_ready(client: httpx.AsyncClient, servers: Servers) -> None:
    for _ in range(1200):
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if (code := servers.ended()) is not None:
            sys.exit(f"a server ended with code {code}")
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


async def loop_delays(client: httpx.AsyncClient, servers: Servers) -> Delays:
    """Return the longest delay of any event loop, and the longest part in which its thread computed."""
    urls = {"server": str(client.base_url)}
    if servers.has_router:
        replicas = (await client.get("/v1/router/replicas")).json()["replicas"]
        urls = {"router": urls["server"]} | {one["name"]: one["url"] for one in replicas}
    found = dict.fromkeys(GAUGES, (0.0, ""))
    for process, url in urls.items():
        text = (await client.get(f"{url.rstrip('/')}/metrics")).text
        for name in GAUGES:
            values = re.findall(rf"^whorl_\w*event_loop_longest_{name}_seconds (\S+)", text, re.MULTILINE)
            found[name] = max([found[name], *((float(value), process) for value in values)])
    return found


async def one_wave(
    client: httpx.AsyncClient, servers: Servers, seen: Observed, keys: Keys | None, args: Any
) -> None:
    """Send a wave; with keys, revoke one meanwhile."""
    target = Target("tiny", args.scale)
    targets = targets_with_keys(target, keys.limited) if keys is not None else (target,)
    attacks = wave(servers.port, one_of_each(args.seed + seen.waves, targets), seen.counts)
    if keys is None:
        await attacks
        return
    _, seconds = await asyncio.gather(attacks, seconds_until_revoked(client, keys.file))
    if seconds is not None:
        seen.revoked.append(seconds)


async def run(servers: Servers, keys: Keys | None, args: Any) -> Observed:
    seen, own = Observed(), authorization(keys.own if keys is not None else "")
    url = f"http://127.0.0.1:{servers.port}"
    async with httpx.AsyncClient(base_url=url, timeout=120, headers=own) as client:
        await wait_until_ready(client, servers)
        text = await control_text(client)
        alone = asyncio.create_task(stream_forever(client, seen, seen.alone))
        await asyncio.sleep(ALONE_SECONDS)
        alone.cancel()
        seen.delays_before = await loop_delays(client, servers)
        reader = asyncio.create_task(stream_forever(client, seen, seen.attacked))
        limit = (
            asyncio.create_task(use_up_limit(client, keys.file, LIMIT_SECONDS)) if keys is not None else None
        )
        deadline = time.monotonic() + args.seconds
        while seen.waves < 2 or time.monotonic() < deadline:
            await one_wave(client, servers, seen, keys, args)
            seen.waves += 1
            seen.changed += await control_text(client) != text
            servers.memory.append(servers.resident_bytes())
            total = sum(servers.memory[-1].values())
            if seen.waves <= WARM_WAVES:
                seen.memory = [total]
            seen.delays = await loop_delays(client, servers)
            delay, own_delay = (f"{seconds * 1e3:.0f} ms in {name}" for seconds, name in seen.delays.values())
            print(
                f"wave {seen.waves}: {seen.counts.tried:,} requests, {len(seen.counts.bad)} bad, longest delay {delay} "
                f"(own {own_delay}), {total / 1e6:,.0f} MB",
                flush=True,
            )
        seen.limit = await limit if limit is not None else None
        reader.cancel()
        await asyncio.gather(alone, reader, return_exceptions=True)
        await asyncio.sleep(sized(12.0, 0.5))  # the last sequences end, and the server returns freed memory
        seen.memory.append(sum(servers.resident_bytes().values()))
    return seen


def report(seen: Observed, servers: Servers, args: Any) -> None:
    counts, (before, after) = seen.counts, seen.memory
    alone, attacked = statistics.median(seen.alone), statistics.median(seen.attacked or [0.0])
    print("grew most: {} by {:.1f} MB".format(*servers.grew_most()))
    samples = [
        {
            "waves": seen.waves, "kinds": len(KINDS), "tried": counts.tried, "refused": counts.refused,
            "answered": counts.answered, "server_errors": counts.server_errors, "bad": len(counts.bad),
            "statuses": {str(k): n for k, n in sorted(counts.statuses.items())}, "control_changed": seen.changed,
            "failed_streams": seen.failed_streams, "replicas": args.replicas, "seconds": args.seconds,
            "delays": seen.delays, "delays_before": seen.delays_before,
        }
    ]  # fmt: skip
    options = "".join(f"-{name}" for name in ("route", "keys") if getattr(args, name))
    options = (f"-{args.replicas}replicas" if args.replicas > 1 else "") + options
    delay, own_delay = seen.delays["delay"][0], seen.delays["own"][0]
    harmless = not counts.bad and not seen.changed
    claim(
        "requests of the attack corpus with a bad answer", ours=len(counts.bad), peer=counts.tried, unit="requests",
        ratio=len(counts.bad), bar=0, ok=harmless, samples=samples, peer_name="requests tried",
        variant=f"answers{options}", quick=args.quick,
    )  # fmt: skip
    claim(
        "longest delay of the server's event loop under attack", ours=delay, peer=own_delay, unit="s", ratio=delay,
        bar=MAX_DELAY, ok=delay <= MAX_DELAY, samples=samples, peer_name="of it, computed by the loop's thread",
        variant=f"delay{options}", quick=args.quick,
    )  # fmt: skip
    claim(
        "memory of the server's processes after the attack", ours=after / 1e6, peer=before / 1e6, unit="MB",
        ratio=after / before, bar=1 + MAX_GROWTH, ok=after <= before * (1 + MAX_GROWTH), samples=servers.series(),
        peer_name=f"after {WARM_WAVES} waves", variant=f"memory{options}", quick=args.quick,
    )  # fmt: skip
    if seen.limit is not None:
        report_keys(seen.limit, seen.revoked, options, args.quick)
    claim(
        "speed of another client's stream under attack", ours=attacked, peer=alone, unit="tokens/s",
        ratio=attacked / alone, bar=MIN_SPEED, ok=attacked >= MIN_SPEED * alone, samples=samples,
        peer_name="alone", variant=f"stream{options}", quick=args.quick,
    )  # fmt: skip


def report_keys(limit: UsedLimit, revoked: list[float], options: str, quick: bool) -> None:
    exact = abs(limit.ratio - 1) <= MAX_OFF_LIMIT and not limit.no_retry_after
    sample = {
        "statuses": {str(k): n for k, n in sorted(limit.statuses.items())}, "no_retry_after": limit.no_retry_after,
        "others": limit.others,
        "seconds": limit.seconds,
    }  # fmt: skip
    claim(
        "requests accepted of a key that sends more than its limit, over all replicas", ours=limit.statuses[200],
        peer=limit.allowed, unit="requests", ratio=limit.ratio, bar=1 + MAX_OFF_LIMIT, ok=exact, samples=[sample],
        peer_name="allowed", variant=f"limit{options}", quick=quick,
    )  # fmt: skip
    longest = max(revoked, default=0.0)
    claim(
        "time until the stream of a revoked key ends under attack", ours=longest,
        peer=statistics.median(revoked or [0.0]), unit="s", ratio=longest, bar=MAX_REVOKED,
        ok=bool(revoked) and longest <= MAX_REVOKED, samples=[round(one, 3) for one in revoked[:60]],
        peer_name="median", variant=f"revoked{options}", quick=quick,
    )  # fmt: skip


def main() -> None:
    def add(parser: Any) -> None:
        parser.add_argument("--seconds", type=float, default=60.0)
        parser.add_argument("--replicas", type=int, default=1)
        parser.add_argument(
            "--route", action="store_true", help="`whorl route` in front of servers started alone"
        )
        parser.add_argument("--keys", action="store_true", help="the server requires API keys")
        parser.add_argument("--seed", type=int, default=0, help="of the first wave")
        parser.add_argument("--scale", type=float, default=1.0, help="of the largest bodies; 1 is 4 MB")

    args = parse(__doc__, add, smoke={"seconds": 1.0, "scale": 0.02}, quick={"seconds": 18.0})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        keys = Keys.made(folder / "keys.json") if args.keys else None
        file = keys.file.path if keys is not None else None
        started = Servers.started(folder / "model", replicas=args.replicas, route=args.route, key_file=file)
        with started as servers:
            os.nice(NICE)  # after the start: the servers keep their priority
            seen = asyncio.run(run(servers, keys, args))
    print(json.dumps({"exit codes of the server": servers.codes}))
    report(seen, servers, args)


if __name__ == "__main__":
    main()
