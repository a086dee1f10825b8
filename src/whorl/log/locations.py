"""URLs of logs: `sqlite:FILE`, `memory:`, `postgresql://...`, `nats://...`, `kafka://...`."""

from __future__ import annotations

import os
from pathlib import Path

from whorl.errors import ConfigError, one_of
from whorl.log.port import Log
from whorl.registry import import_backend

# scheme -> class, and the extra that it needs
BACK_ENDS = {
    "sqlite": ("whorl.log.sqlite:SqliteLog", ""),
    "memory": ("whorl.log.memory:MemoryLog", ""),
    "postgresql": ("whorl.log.postgres:PostgresLog", "postgres"),
    "nats": ("whorl.log.nats:NatsLog", "nats"),
    "kafka": ("whorl.log.kafka:KafkaLog", "kafka"),
}


def open_log(url: str) -> Log:
    """Open a log.

    Raises:
        ConfigError: no such scheme, or its client is not installed. LogUnavailableError: it does not answer.
    """
    scheme = url.partition(":")[0]
    if scheme not in BACK_ENDS:
        raise ConfigError(
            f"the log {url!r} begins with {scheme!r}", expected=one_of(scheme, list(BACK_ENDS)),
            do="give a URL such as sqlite:events.db or postgresql://localhost/events",
        )  # fmt: skip
    opened: Log = import_backend(scheme, *BACK_ENDS[scheme])(url)
    return opened


def default_log(store: str | os.PathLike[str]) -> str:
    """Return the URL of the log that belongs to a store: the variable WHORL_LOG, or a SQLite file in its folder."""
    return os.environ.get("WHORL_LOG") or f"sqlite:{Path(store) / 'log' / 'events.db'}"
