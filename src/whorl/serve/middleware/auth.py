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

FILE = "whorl-keys.json"
LETTERS = string.ascii_lowercase + string.digits
LOOK_SECONDS = 1.0
NOBODY = "0" * 64


@dataclass(frozen=True)
class Key:
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

    def read(self) -> list[Key]:
        """All keys, oldest first; none if there is no file."""
        try:
            data = json.loads(self.path.read_text(encoding="utf-8"))
            keys = [Key(**entry) for entry in data["keys"]]
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
        number = "".join(secrets.choice(LETTERS) for _ in range(8))
        whole = f"wk-{number}-{secrets.token_urlsafe(32)}"
        made = Key(number, name, _hash(whole), int(time.time()), requests_per_minute, tokens_per_minute)
        self._write([*keys, made])
        return whole

    def revoke(self, which: str) -> Key:
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

    def _write(self, keys: list[Key]) -> None:
        aside = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as out:
            json.dump({"keys": [asdict(key) for key in keys]}, out, indent=1)
        aside.replace(self.path)


@dataclass
class Bucket:
    """`limit` a minute; full at first. Seconds come from `clock`."""

    limit: int | None
    clock: Callable[[], float] = time.monotonic
    level: float = field(init=False)
    seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.level, self.seen = float(self.limit or 0), self.clock()

    def wait(self, amount: float) -> float:
        """Seconds until `amount` may be taken: 0 now, inf never."""
        if self.limit is None:
            return 0.0
        self._flow()
        if amount > self.limit:
            return math.inf
        return max(0.0, (amount - self.level) * 60 / self.limit)

    def take(self, amount: float) -> None:
        """Takes it, below zero if need be."""
        if self.limit is not None:
            self._flow()
            self.level -= amount

    @property
    def full_in(self) -> float:
        """Seconds until all of it is there again."""
        return 0.0 if self.limit is None else max(0.0, (self.limit - self.level) * 60 / self.limit)

    def _flow(self) -> None:
        assert self.limit is not None
        now = self.clock()
        self.level = min(self.limit, self.level + (now - self.seen) * self.limit / 60)
        self.seen = now


class Account:
    """A key at work: its two buckets."""

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self.key = key
        self.requests = Bucket(key.requests_per_minute, clock)
        self.tokens = Bucket(key.tokens_per_minute, clock)

    @property
    def headers(self) -> dict[str, str]:
        """As OpenAI's, of the limits that there are."""
        out: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket.limit is not None:
                out[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
                out[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level)))
                out[f"x-ratelimit-reset-{name}"] = f"{bucket.full_in:.3f}s"
        return out


class Accounts:
    """The keys of a file, as a server asks for them."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.file, self.clock = KeyFile(path), clock
        self._accounts: dict[str, Account] = {}
        self._stamp: object = None
        self._looked = -math.inf
        self._look()

    def find(self, key: str) -> Account | None:
        """The account of a key as it was shown, or None."""
        self._look()
        parts = key.split("-", 2)
        account = self._accounts.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(_hash(key), account.key.hash if account else NOBODY)
        return account if same else None

    def _look(self) -> None:
        now = self.clock()
        if now - self._looked < LOOK_SECONDS:
            return
        self._looked = now
        try:
            found = self.file.path.stat()
            stamp: object = (found.st_mtime_ns, found.st_size, found.st_ino)
        except OSError:
            stamp = "gone"
        if stamp == self._stamp:
            return
        fresh = {}
        for key in self.file.read():
            old = self._accounts.get(key.id)
            fresh[key.id] = old if old is not None and old.key == key else Account(key, self.clock)
        self._accounts, self._stamp = fresh, stamp


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
