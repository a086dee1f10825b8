"""The attacked processes: `whorl serve` of a small model, alone, as replicas, or behind `whorl route`; and their memory.

    with Servers.started(folder, replicas=2, route=False, key_file=None) as servers: ...

A server listens on `servers.port`. At the end all get SIGTERM, and `servers.codes` has their exit codes.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

MAX_POINTS = 60  # of a series of memory
OPTIONS = [
    "--name", "tiny", "--dtype", "float32", "--threads", "1", "--max-model-len", "1024", "--kv-cache-memory", "0.05",
]  # fmt: skip


def write_model(folder: Path) -> None:
    """Write a small model of random weights whose tokens are bytes."""
    from whorl.models import Transformer, save_model
    from whorl.plan.accounting.model_cost import decoder_config
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.seeds import generator

    tokenizer = Tokenizer([bytes([i]) for i in range(256)])
    save_model(Transformer(decoder_config(64, 2, tokenizer.vocab_size), generator(0, "bench")).eval(), folder)
    tokenizer.save(folder)


@dataclass
class Servers:
    """The processes; the first to be stopped comes first. memory: resident bytes by name, after each wave."""

    port: int
    has_router: bool
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    memory: list[dict[str, int]] = field(default_factory=list)

    @classmethod
    @contextmanager
    def started(cls, folder: Path, *, replicas: int, route: bool, key_file: Path | None) -> Iterator[Servers]:
        """Start the processes. route: the replicas run alone, and `whorl route` gets their addresses."""
        from whorl.router.replica_processes import free_port

        servers = cls(free_port(), route or replicas > 1)
        keys = ["--api-key-file", str(key_file)] if key_file is not None else []
        try:
            if route:
                ports = [free_port() for _ in range(replicas)]
                servers._start(
                    "route", *(f"http://127.0.0.1:{port}" for port in ports), "--port", str(servers.port)
                )
                for port in ports:
                    servers._start("serve", str(folder), "--port", str(port), *OPTIONS, *keys)
            else:
                words = ["--port", str(servers.port), "--replicas", str(replicas)]
                servers._start("serve", str(folder), *words, *OPTIONS, *keys)
            yield servers
        finally:
            for process in servers.processes:
                process.send_signal(signal.SIGTERM)
                servers.codes.append(process.wait(60))

    def _start(self, *words: str) -> None:
        command = [sys.executable, "-m", "whorl.cli", *words]
        self.processes.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))

    def ended(self) -> int | None:
        """The exit code of a process that ended, or None if all run."""
        return next((p.returncode for p in self.processes if p.poll() is not None), None)

    def resident_bytes(self) -> dict[str, int]:
        """Return the resident bytes of each server and router, and of the helper processes of each."""
        found: Counter[str] = Counter()
        for popen in self.processes:
            process = psutil.Process(popen.pid)
            for one in [process, *process.children(recursive=True)]:
                with suppress(psutil.NoSuchProcess):
                    found[_name(one)] += one.memory_info().rss
        return dict(found)

    def total_bytes(self) -> int:
        return sum(self.resident_bytes().values())

    def series(self) -> list[dict[str, float]]:
        """Return `memory` in MB, thinned to at most `MAX_POINTS` points with the first and the last."""
        last = len(self.memory) - 1
        n = min(MAX_POINTS, len(self.memory))
        at = sorted({round(i * last / max(1, n - 1)) for i in range(n)})
        return [{"wave": i + 1} | {name: round(b / 1e6, 1) for name, b in self.memory[i].items()} for i in at]

    def grew_most(self) -> tuple[str, float]:
        """Return the name of the process whose memory grew most from the first wave to the last, and the MB."""
        first, last = self.memory[0], self.memory[-1]
        name = max(last, key=lambda one: last[one] - first.get(one, 0))
        return name, (last[name] - first.get(name, 0)) / 1e6


def _name(process: psutil.Process) -> str:
    """A server or router by its verb and port; any other process by the server that started it."""
    words: Sequence[str] = process.cmdline()
    if "whorl.cli" in words:
        verb = words[words.index("whorl.cli") + 1]
        port = [words[i + 1] for i, word in enumerate(words) if word == "--port"][-1]
        return f"{'router' if verb == 'route' or _has_servers(process) else 'server'} :{port}"
    server = next((one for one in process.parents() if "whorl.cli" in one.cmdline()), None)
    return "helpers" if server is None else f"helpers of {_name(server)}"


def _has_servers(process: psutil.Process) -> bool:
    return any("whorl.cli" in child.cmdline() for child in process.children())
