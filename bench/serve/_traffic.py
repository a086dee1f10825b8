"""Sends attacks to a server on this machine, and counts what becomes of them.

    outcome = await send(port, attack)            one connection
    counts = await wave(port, attacks)            many, a bounded number at once

An answer with status 500 or more is bad, except for 503 with Retry-After. So are a 429 without it, an "internal_error" in a
stream, output for a client without a valid key, and no answer within `ANSWER_SECONDS` where the attacker waits for one.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from bench.serve._attacks import Attack

ANSWER_SECONDS = 60.0
ATTACKER = "127.0.0.2"  # another client than 127.0.0.1: without keys, clients are addresses
MAX_ANSWER = 64 << 20  # bytes that are read of one answer
CONCURRENCY = 16
# Output, models, metrics and state of a server, and the state of a router
PROTECTED = re.compile(
    rb'"object":"(text_completion|chat\.completion|response|list|model|embedding)'
    rb'|"tokens":\[|"latencies":|whorl_up |"circuit":'
)
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})[^\r]*\r\n((?:[^\r]+\r\n)*)\r\n")


@dataclass
class Outcome:
    """Statuses of the answers on one connection; `bad`: why one of them is not acceptable."""

    statuses: list[int] = field(default_factory=list)
    bad: str = ""


@dataclass
class Counts:
    """Sums over attacks. kept: (kind, seed, reason) of the bad ones."""

    tried: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bad: list[tuple[str, int, str]] = field(default_factory=list)

    @property
    def answered(self) -> int:
        return sum(n for status, n in self.statuses.items() if status < 400)

    @property
    def refused(self) -> int:
        return sum(n for status, n in self.statuses.items() if status >= 400)

    @property
    def server_errors(self) -> int:
        """Answers with a status of 500 or more, without those that are acceptable."""
        return sum(reason != "no answer" for _, _, reason in self.bad)


async def send(port: int, attack: Attack) -> Outcome:
    """Make one attack, with all its copies. A connection that the server closes or refuses is an answer, too."""
    outcomes = await asyncio.gather(*(_send_one(port, attack) for _ in range(attack.copies)))
    statuses = [status for outcome in outcomes for status in outcome.statuses]
    return Outcome(statuses, next((outcome.bad for outcome in outcomes if outcome.bad), ""))


async def _send_one(port: int, attack: Attack) -> Outcome:
    answer = bytearray()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(ATTACKER, 0))
            for part in attack.parts:
                if writer.transport.is_closing():  # by the server
                    break
                writer.write(part)
                await _drain_or_read(reader, writer, answer)
                await asyncio.sleep(attack.pause)
            if attack.hold and attack.reading == "nothing":
                await asyncio.sleep(attack.hold)
            elif attack.reading == "little":
                answer += await reader.read(2000)
            elif attack.reading == "all":
                limit = attack.hold or ANSWER_SECONDS
                with suppress(TimeoutError):  # an attack with `hold` waits for no end
                    async with asyncio.timeout(limit):
                        await _read(reader, answer)
                    limit = 0.0
                if limit == ANSWER_SECONDS:
                    return Outcome(bad="no answer")
    except TimeoutError:
        return Outcome(bad="no answer")
    except OSError:  # closed by the server
        pass
    finally:
        if writer is not None:
            writer.transport.abort()
    return judge(bytes(answer), attack.denied)


async def _read(reader: asyncio.StreamReader, answer: bytearray) -> None:
    while (data := await reader.read(1 << 16)) and len(answer) < MAX_ANSWER:
        answer += data


async def _drain_or_read(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answer: bytearray
) -> None:
    """Wait until the server has taken the bytes, and read meanwhile: it may answer before it has read all."""
    draining = asyncio.ensure_future(writer.drain())
    reading = asyncio.ensure_future(_read(reader, answer))
    try:
        await asyncio.wait({draining, reading}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (draining, reading):
            task.cancel()
        await asyncio.gather(draining, reading, return_exceptions=True)


def judge(answer: bytes, denied: bool = False) -> Outcome:
    """Return the outcome for the bytes that the server sent. denied: as in `Attack`."""
    outcome = Outcome()
    for match in STATUS.finditer(answer):
        status, headers = int(match[1]), match[2].lower()
        outcome.statuses.append(status)
        refused = status in (429, 503) and b"\r\nretry-after:" in b"\r\n" + headers
        if (status >= 500 or status == 429) and not refused:
            outcome.bad = f"status {status}: {answer[match.start() : match.end() + 200]!r}"
    if b'"internal_error"' in answer:
        outcome.bad = outcome.bad or "an internal error in a stream"
    if denied and (leak := PROTECTED.search(answer)):
        outcome.bad = outcome.bad or f"an answer without a valid key: {answer[leak.start() :][:200]!r}"
    return outcome


async def wave(port: int, attacks: Iterable[tuple[str, int, Attack]], counts: Counts | None = None) -> Counts:
    """Send attacks, given as (kind, seed, attack), and add their outcomes to `counts`."""
    counts = counts if counts is not None else Counts()
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(kind: str, seed: int, attack: Attack) -> None:
        async with gate:
            outcome = await send(port, attack)
        counts.tried += 1
        counts.statuses.update(outcome.statuses)
        if outcome.bad:
            counts.bad.append((kind, seed, outcome.bad))
            print(f"bad: {kind} {seed}: {outcome.bad[:300]}", flush=True)

    running = []
    for kind, seed, attack in attacks:
        running.append(asyncio.ensure_future(one(kind, seed, attack)))
        await gate.acquire()  # the attacks are made when they are needed
        gate.release()
    await asyncio.gather(*running)
    return counts
