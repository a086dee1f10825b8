"""A key for each actor, so that what a person wrote can be destroyed without changing the log (crypto-shredding).

    keys = ActorKeys(Path(".whorl/log/keys.db"))
    event = keys.seal(event)          # AES-256-GCM of the private fields under the actor's key
    keys.open(event)                  # None once the actor is erased
    keys.erase("ada")

Keys lie apart from the log: a copy of the log without this file shows who clicked what, and no text.
"""

from __future__ import annotations

import base64
import dataclasses
import os
import sqlite3
import threading
from pathlib import Path
from typing import Any

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from whorl.errors import DataError
from whorl.log.event import Event

PRIVATE = {"completion.made": ("prompt", "prompt_ids", "choices"), "feedback.given": ("text",)}


class ActorKeys:
    """The keys of actors, in a SQLite file that only its owner reads, for any thread. ciphers: keys in memory."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(mode=0o600)
        self._lock, self.ciphers, self._version = threading.Lock(), dict[str, AESGCM](), -1
        self._database = sqlite3.connect(path, timeout=60, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.execute("PRAGMA secure_delete=ON")
        self._database.execute("CREATE TABLE IF NOT EXISTS keys (actor TEXT PRIMARY KEY, key BLOB)")

    def seal(self, event: Event) -> Event:
        """Return the event with its private fields sealed; one that is sealed already has none.

        Raises:
            DataError: the actor is erased.
        """
        data = dict(event.data or {})
        private = {name: data.pop(name) for name in PRIVATE.get(event.type, ()) if data.get(name)}
        if not private:
            return event
        cipher = self._cipher(data["actor"], make=True)
        if cipher is None:
            raise DataError(f"the actor {data['actor']!r} is erased", expected="another name")
        nonce = os.urandom(12)
        sealed = nonce + cipher.encrypt(nonce, orjson.dumps(private), event.id.encode())
        return dataclasses.replace(event, data=data | {"sealed": base64.b64encode(sealed).decode()})

    def open(self, event: Event) -> dict[str, Any] | None:
        """Return the data with the private fields; None if the actor is erased.

        Raises:
            DataError: the seal was made with another key, or for another event.
        """
        data = dict(event.data or {})
        if "sealed" not in data:
            return data
        if (cipher := self._cipher(data["actor"])) is None:
            return None
        sealed = base64.b64decode(data.pop("sealed"))
        try:
            private: dict[str, Any] = orjson.loads(
                cipher.decrypt(sealed[:12], sealed[12:], event.id.encode())
            )
            return data | private
        except InvalidTag:
            raise DataError(
                f"{event.type} {event.id}: the seal does not open", expected="the key file of this log"
            ) from None

    def erase(self, actor: str) -> bool:
        """Destroy the key of an actor; return whether there was one. No new one is made for this name."""
        with self._lock:
            self.ciphers.pop(actor, None)
            found = self._database.execute("SELECT key FROM keys WHERE actor = ?", (actor,)).fetchone()
            self._database.execute("INSERT OR REPLACE INTO keys VALUES (?, NULL)", (actor,))
            return found is not None and found[0] is not None

    def close(self) -> None:
        self._database.close()

    def _cipher(self, actor: str, make: bool = False) -> AESGCM | None:
        with self._lock:
            version = self._database.execute("PRAGMA data_version").fetchone()[0]
            if version != self._version:  # another process changed the file: it may have erased an actor
                self._version = version
                self.ciphers.clear()
            if (found := self.ciphers.get(actor)) is not None:
                return found
            if make:
                fresh = AESGCM.generate_key(256)
                self._database.execute("INSERT OR IGNORE INTO keys VALUES (?, ?)", (actor, fresh))
            row = self._database.execute("SELECT key FROM keys WHERE actor = ?", (actor,)).fetchone()
            if row is None or row[0] is None:
                return None
            self.ciphers[actor] = AESGCM(row[0])
            return self.ciphers[actor]
