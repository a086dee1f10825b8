"""API keys: made once, shown once, kept as hashes; and what each may ask for in a minute.

    wk-ID-SECRET            ID: 8 letters that name the key in lists and logs; SECRET: 43 letters, 256 random bits

The file (JSON, readable by its owner alone) holds sha256(whole key) in hex. Passwords want a slow, salted hash, since
people choose them from few; a key has 256 random bits, nobody will ever try them all, and a slow hash would only make
every request slow. What a fast comparison could leak, byte by byte, is kept from leaking by comparing hashes in
constant time; the ID, which is no secret, finds the one hash to compare with, and an unknown ID costs the same
comparison.

Limits are token buckets, a minute's worth deep: `level` flows back at limit / 60 a second. A request takes 1 from the
bucket of requests and its prompt's length from the bucket of tokens, if they are there. What it then writes is taken
when it is done, down to below zero if need be: nobody knows beforehand how much it will be, and whoever has run into
debt waits until it has flowed back. So a burst is at most a minute's worth of prompts, and the mean is the limit.

A server looks at the file again when it has changed (at most once a second): a revoked key ends without a restart.
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
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from whorl.errors import ConfigError

DEFAULT_KEY_FILE = "whorl-keys.json"
ID_CHARS = string.ascii_lowercase + string.digits
RELOAD_SECONDS = 1.0
DUMMY_HASH = "0" * 64


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key. Limits: None is none."""

    id: str
    name: str
    hash: str
    created: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


class KeyFile:
    """The keys in a file.

    Raises:
        ConfigError: from every method: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[ApiKey]:
        """All keys, oldest first; none if there is no file."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            keys = [ApiKey(**entry) for entry in data["keys"]]
            if any(len(key.hash) != 64 or not key.id for key in keys):
                raise ValueError("a hash is not 64 characters long")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self.path} cannot be read as a file of keys: {error}",
                expected="what `whorl keys add` writes",
                do="restore the file, or remove it and make new keys",
            ) from error
        return keys

    def add(
        self, name: str, requests_per_minute: int | None = None, tokens_per_minute: int | None = None
    ) -> str:
        """Makes a key and returns it; afterwards nobody can read it any more.

        Raises:
            ConfigError: the name is empty or taken.
        """
        keys = self.read()
        if not name.strip() or any(key.name == name for key in keys):
            raise ConfigError(
                f"the name {name!r} is {'taken' if name.strip() else 'empty'}", expected="one for each key"
            )
        number = "".join(secrets.choice(ID_CHARS) for _ in range(8))
        whole = f"wk-{number}-{secrets.token_urlsafe(32)}"
        made = ApiKey(number, name, _hash(whole), int(time.time()), requests_per_minute, tokens_per_minute)
        self._write([*keys, made])
        return whole

    def revoke(self, which: str) -> ApiKey:
        """Removes the key of that name or id.

        Raises:
            ConfigError: there is none.
        """
        keys = self.read()
        found = [key for key in keys if which in (key.name, key.id)]
        if len(found) != 1:
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"there is no key {which!r}", expected=f"one of: {known}")
        self._write([key for key in keys if key is not found[0]])
        return found[0]

    def _write(self, keys: list[ApiKey]) -> None:
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"keys": [asdict(key) for key in keys]}, out, indent=1)
        aside.replace(self.path)


@dataclass
class TokenBucket:
    """`limit` a minute; full at first. Seconds come from `clock`."""

    limit: int | None
    clock: Callable[[], float] = time.monotonic
    available: float = field(init=False)
    last_refill: float = field(init=False)

    def __post_init__(self) -> None:
        self.available, self.last_refill = float(self.limit or 0), self.clock()

    def seconds_until(self, amount: float) -> float:
        """Seconds until `amount` may be taken: 0 now, inf never."""
        if self.limit is None:
            return 0.0
        self._refill()
        if amount > self.limit:
            return math.inf
        return max(0.0, (amount - self.available) * 60 / self.limit)

    def consume(self, amount: float) -> None:
        """Takes it, below zero if need be."""
        if self.limit is not None:
            self._refill()
            self.available -= amount

    @property
    def seconds_until_full(self) -> float:
        """Seconds until all of it is there again."""
        return 0.0 if self.limit is None else max(0.0, (self.limit - self.available) * 60 / self.limit)

    def _refill(self) -> None:
        assert self.limit is not None
        now = self.clock()
        self.available = min(self.limit, self.available + (now - self.last_refill) * self.limit / 60)
        self.last_refill = now


class KeyLimits:
    """A key at work: its two buckets."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.requests = TokenBucket(key.requests_per_minute, clock)
        self.tokens = TokenBucket(key.tokens_per_minute, clock)

    @property
    def headers(self) -> dict[str, str]:
        """As OpenAI's, of the limits that there are."""
        out: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.limit is not None:
                out[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                out[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.available)))
                out[f"x-ratelimit-reset-{name}"] = f"{bucket.seconds_until_full:.3f}s"
        return out


class KeyStore:
    """The keys of a file, as a server asks for them."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.clock = KeyFile(path), clock
        self._limits_by_key: dict[str, KeyLimits] = {}
        self._file_state: object = None
        self._last_check = -math.inf
        self._reload_if_changed()

    def authenticate(self, key: str) -> KeyLimits | None:
        """The account of a key as it was shown, or None."""
        self._reload_if_changed()
        parts = key.split("-", 2)
        account = self._limits_by_key.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(_hash(key), account.key.hash if account else DUMMY_HASH)
        return account if same else None

    def _reload_if_changed(self) -> None:
        now = self.clock()
        if now - self._last_check < RELOAD_SECONDS:
            return
        self._last_check = now
        try:
            found = self.file.path.stat()
            stamp: object = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            stamp = "gone"
        if stamp == self._file_state:
            return
        fresh = {}
        for key in self.file.read():
            old = self._limits_by_key.get(key.id)
            fresh[key.id] = old if old is not None and old.key == key else KeyLimits(key, self.clock)
        self._limits_by_key, self._file_state = fresh, stamp


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
