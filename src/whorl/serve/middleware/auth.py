"""API keys with rate limits. A key is shown once, and only its hash is stored.

    wk-ID-SECRET            ID: 8 characters, shown in lists and logs; SECRET: 43 characters, 256 random bits

The key file (JSON, mode 0600) holds sha256(key) in hex. A slow, salted hash as for passwords is not needed: 256 random bits
cannot be enumerated, and a slow hash would delay every request. Hashes are compared in constant time. The ID selects the
hash to compare with; an unknown ID costs the same comparison.

Rate limits are token buckets (`rate_limit.py`). The server reloads the file when it changes, at most once per second, so
that a revoked key stops working without a restart.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from whorl.errors import ConfigError
from whorl.serve.middleware.rate_limit import TokenBucket

DEFAULT_KEY_FILE = "whorl-keys.json"
ID_CHARS = string.ascii_lowercase + string.digits
RELOAD_SECONDS = 1.0
DUMMY_HASH = "0" * 64


@dataclass(frozen=True)
class ApiKey:
    """The stored part of a key. A limit of None is no limit."""

    id: str
    name: str
    hash: str
    created: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyFile:
    """A file of API keys.

    Raises:
        ConfigError: from every method, if the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[ApiKey]:
        """Return all keys, oldest first; an empty list if the file does not exist."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            keys = [ApiKey(**entry) for entry in data["keys"]]
            if any(len(key.hash) != 64 or not key.id for key in keys):
                raise ValueError("a hash is not 64 characters long")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} is not a valid key file: {error}",
                expected="a file written by `whorl keys add`",
                do="restore the file, or remove it and create new keys",
            ) from error
        return keys

    def add(
        self, name: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
    ) -> str:
        """Create a key and return its full text, name_or_id is not stored.

        Raises:
            ConfigError: the name is empty or taken.
        """
        keys = self.read()
        if not name.strip() or any(key.name == name for key in keys):
            raise ConfigError(
                f"the name {name!r} is {'taken' if name.strip() else 'empty'}", expected="a unique name"
            )
        key_id = "".join(secrets.choice(ID_CHARS) for _ in range(8))
        full_key = f"wk-{key_id}-{secrets.token_urlsafe(32)}"
        entry = ApiKey(
            key_id, name, _hash(full_key), int(time.time()), requests_per_minute, tokens_per_minute
        )
        self._write([*keys, entry])
        return full_key

    def revoke(self, name_or_id: str) -> ApiKey:
        """Remove and return the key with this name or id.

        Raises:
            ConfigError: no such key.
        """
        keys = self.read()
        matches = [key for key in keys if name_or_id in (key.name, key.id)]
        if len(matches) != 1:
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"no key {name_or_id!r}", expected=f"one of: {known}")
        self._write([key for key in keys if key is not matches[0]])
        return matches[0]

    def _write(self, keys: list[ApiKey]) -> None:
        temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"keys": [asdict(key) for key in keys]}, out, indent=1)
        temporary.replace(self.path)


class KeyLimits:
    """The rate limits of a key in use: one bucket of requests, one of tokens."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.requests = TokenBucket(key.requests_per_minute, clock)
        self.tokens = TokenBucket(key.tokens_per_minute, clock)

    @property
    def headers(self) -> dict[str, str]:
        """Return OpenAI's x-ratelimit headers for the limits that are set."""
        out: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.limit is not None:
                out[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                out[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.available)))
                out[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until_full:.3f}s"
        return out


class KeyStore:
    """The keys of a file as the server uses them, reloaded when the file changes."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.clock = KeyFile(path), clock
        self._limits_by_key: dict[str, KeyLimits] = {}
        self._file_state: object = None
        self._last_check = -math.inf
        self._reload_if_changed()

    def authenticate(self, key: str) -> KeyLimits | None:
        """Return the limits of a key, given its full text, or None if the key is unknown."""
        self._reload_if_changed()
        parts = key.split("-", 2)
        limits = self._limits_by_key.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(_hash(key), limits.key.hash if limits else DUMMY_HASH)
        return limits if same else None

    def _reload_if_changed(self) -> None:
        now = self.clock()
        if now - self._last_check < RELOAD_SECONDS:
            return
        self._last_check = now
        try:
            status = self.file.path.stat()
            file_state: object = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            file_state = "gone"
        if file_state == self._file_state:
            return
        fresh = {}
        for key in self.file.read():
            old = self._limits_by_key.get(key.id)
            fresh[key.id] = old if old is not None and old.key == key else KeyLimits(key, self.clock)
        self._limits_by_key, self._file_state = fresh, file_state


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
