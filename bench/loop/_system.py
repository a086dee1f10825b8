"""The feedback system as processes that can be killed: the API, `whorl loop`, and the servers of log, views and cache.

`python bench/loop/_system.py LOG FOLDER PORT` is the API's process: the route of `whorl serve` without an engine.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from whorl.log import open_log
from whorl.log.port import LogUnavailableError
from whorl.loop.feedback_token import issue_token, load_secret

KINDS = ("like", "like", "like", "like", "dislike", "none")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Request:
    """A click that a client sends until it is acknowledged."""

    id: str
    actor: str
    completion: str
    kind: str

    def body(self, secret: bytes) -> bytes:
        token = issue_token(secret, self.completion, 1, self.actor)
        return json.dumps({"token": token, "kind": self.kind, "id": self.id}).encode()


def zipf_requests(n: int, answers: int, seed: int, exponent: float = 1.1) -> list[Request]:
    """Return clicks of n / 20 actors on answers with probabilities that fall as rank ** -exponent; 0 is uniform."""
    draw = np.random.default_rng(seed)
    weights = np.arange(1, answers + 1.0) ** -exponent
    chosen = draw.choice(answers, n, p=weights / weights.sum())
    actors, kinds = draw.integers(max(1, n // 20), size=n), draw.integers(len(KINDS), size=n)
    return [
        Request(f"click {i}", f"actor {a}", f"completion-{c}", KINDS[k])
        for i, (c, a, k) in enumerate(zip(chosen, actors, kinds, strict=True))
    ]


class System:
    """The processes of one system. `servers` are those of tests/support/log, `urls` the options of `whorl loop`.

    loop: a script that runs in place of `whorl loop`, and counts its commits in the file `commits`.
    """

    def __init__(self, kind: str, folder: Path, loop: str = "") -> None:
        self.commits = folder / "commits.json"
        self.folder, self.port, self.secret = folder, free_port(), load_secret(folder / "secret")
        self.urls = {"--log": f"sqlite:{folder / 'events.db'}", "--views": f"sqlite:{folder / 'views.db'}"}
        self.servers, self.children, self._stack = {}, dict[str, subprocess.Popen[bytes]](), ExitStack()
        if kind != "sqlite":
            from tests.support.log.s3 import object_store
            from tests.support.log.servers import running

            options = dict[str, Any]()
            if kind == "kafka":  # its own stores are in memory, and lose everything at a SIGKILL
                options = {"storage": "s3://tansu/", "environment": self._stack.enter_context(object_store())}
            self.servers["log"] = self._stack.enter_context(running(kind, **options))
            self.urls["--log"] = self.servers["log"].url
            if kind == "kafka":
                # Tansu returns nothing from S3 within the default of 5 ms. And after a SIGKILL it acknowledges the repeat of
                # an idempotent producer that it has not stored.
                self.urls["--log"] += "?fetch.wait.max.ms=200&enable.idempotence=false"
        if kind == "postgresql":
            self.urls["--views"] = self.urls["--log"]
            port = free_port()
            self.urls["--cache"] = f"redis://127.0.0.1:{port}"
            self._commands = {
                "redis": ["redis-server", "--port", str(port), "--save", "", "--dir", str(folder)]
            }
        else:
            self._commands = {}
        api = [sys.executable, str(Path(__file__)), self.urls["--log"], str(folder), str(self.port)]
        options = [word for pair in self.urls.items() for word in pair]
        self._commands |= {"api": api, "loop": [sys.executable, "-m", "whorl.cli", "loop", *options]}
        if loop:
            self._commands["loop"] = [sys.executable, loop, "--count", *self.urls.values(), str(self.commits)]

    def start(self) -> None:
        for name in self._commands:
            self._start(name)

    def kill(self, name: str) -> None:
        """SIGKILL a process and start it again."""
        if name in self.servers:
            self.servers[name].kill()
            self.servers[name].start()
            return
        self.children[name].kill()
        self.children[name].wait()
        self._start(name)

    @property
    def names(self) -> list[str]:
        return [*self.children, *self.servers]

    def close(self) -> None:
        for child in self.children.values():
            child.send_signal(signal.SIGTERM)
        for child in self.children.values():
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
        self._stack.close()

    def _start(self, name: str) -> None:
        with (self.folder / f"{name}.txt").open("ab") as output:
            self.children[name] = subprocess.Popen(self._commands[name], stdout=output, stderr=output)


@contextmanager
def started(kind: str, folder: Path, loop: str = "") -> Iterator[System]:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its processes end too
    system = System(kind, folder, loop)
    try:
        system.start()
        yield system
    finally:
        system.close()


class HttpClient:
    """A connection that stays open. Raises OSError, EOFError."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Return status and body of the response."""
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = self._streams
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            head += f"Content-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            async with asyncio.timeout(60):
                answer = await reader.readuntil(b"\r\n\r\n")
                length = next(
                    line[15:] for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:")
                )
                return int(answer[9:12]), await reader.readexactly(int(length))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None

    async def send(self, request: Request, secret: bytes) -> str:
        """Send a click until it is acknowledged; return the id of its event."""
        body = request.body(secret)
        while True:
            try:
                status, answer = await self.post("/v1/feedback", body)
            except (OSError, EOFError):
                await asyncio.sleep(0.05)
                continue
            if status == 202:
                return str(json.loads(answer)["id"])
            if status != 503:
                raise RuntimeError(f"{status}: {answer[:500]!r}")
            await asyncio.sleep(0.05)


async def send_all(
    system: System, requests: Sequence[Request], clients: int, repeat: float, acknowledged: set[str]
) -> None:
    """Send the clicks of each actor in order, some of them twice; add the ids of acknowledged events."""

    shares: list[list[Request]] = [[] for _ in range(clients)]
    for request in requests:
        shares[int(request.actor[6:]) % clients].append(request)

    async def client(number: int) -> None:
        draw, connection = random.Random(number), HttpClient(system.port)
        for request in shares[number]:
            for _ in range(1 + (draw.random() < repeat)):
                acknowledged.add(await connection.send(request, system.secret))
        connection.close()

    async with asyncio.TaskGroup() as tasks:
        for number in range(clients):
            tasks.create_task(client(number))


def serve_api(url: str, folder: Path, port: int) -> None:
    """Serve the feedback route; wait for a log that is away."""
    import uvicorn

    from whorl.loop.actor_keys import ActorKeys
    from whorl.serve.api.feedback import feedback_app

    while True:
        try:
            app = feedback_app(open_log(url), ActorKeys(folder / "keys.db"), load_secret(folder / "secret"))
            break
        except LogUnavailableError:
            time.sleep(0.2)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    serve_api(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
