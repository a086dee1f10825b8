"""API keys with rate limits. A key is shown once, and only its hash is stored.

    wk-ID-SECRET            ID: 8 characters, shown in lists and logs; SECRET: 43 characters, 256 random bits

The key file (JSON, mode 0600) holds sha256(key) in hex. A slow, salted hash as for passwords is not needed: 256 random bits
cannot be enumerated, and a slow hash would delay every request. Hashes are compared in constant time. The ID selects the
hash to compare with; an unknown ID costs the same comparison.

Rate limits are token buckets (`rate_limit.py`). The server reloads the file when it changes, at most twice per second, so
that a revoked key stops working without a restart. A file that became unreadable changes nothing: the keys that were read
last stay valid, and the reason is logged.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import secrets
import string
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from filelock import FileLock

from whorl.errors import ConfigError
from whorl.files import write_atomic
from whorl.serve.errors import ApiError
from whorl.serve.middleware.rate_limit import SharedLevels, TokenBucket

LOG = logging.getLogger("whorl.serve")
ID_CHARS = string.ascii_lowercase + string.digits
RELOAD_SECONDS = 0.5
DUMMY_HASH = "0" * 64


@dataclass(frozen=True)
class ApiKey:
    """The stored part of a key. A limit of None is no limit. min_priority: lowest `priority` of its requests."""

    id: str
    name: str
    hash: str
    created: int
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    min_priority: int = 0


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
        self,
        name: str,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        min_priority: int = 0,
    ) -> str:
        """Create a key and return its full text, which is not stored.

        Raises:
            ConfigError: the name is empty or taken.
        """
        with self._locked():
            keys = self.read()
            if not name.strip() or any(key.name == name for key in keys):
                raise ConfigError(
                    f"the name {name!r} is {'taken' if name.strip() else 'empty'}", expected="a unique name"
                )
            key_id = "".join(secrets.choice(ID_CHARS) for _ in range(8))
            full_key = f"wk-{key_id}-{secrets.token_urlsafe(32)}"
            created = int(time.time())
            entry = ApiKey(
                key_id, name, _hash(full_key), created, requests_per_minute, tokens_per_minute, min_priority
            )
            self._write([*keys, entry])
        return full_key

    def revoke(self, name_or_id: str) -> ApiKey:
        """Remove and return the key with this name or id.

        Raises:
            ConfigError: no such key.
        """
        with self._locked():
            keys = self.read()
            matches = [key for key in keys if name_or_id in (key.name, key.id)]
            if len(matches) != 1:
                known = ", ".join(key.name for key in keys) or "none"
                raise ConfigError(f"no key {name_or_id!r}", expected=f"one of: {known}")
            self._write([key for key in keys if key is not matches[0]])
        return matches[0]

    def _locked(self) -> AbstractContextManager[object]:
        """Hold the file's lock from reading to writing, so that no change of another process is lost."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            return FileLock(self.path.with_name(f".{self.path.name}.lock"), mode=0o600).acquire()
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written: {error.strerror}", expected="a file in a writable folder"
            ) from error

    def _write(self, keys: list[ApiKey]) -> None:
        text = json.dumps({"keys": [asdict(key) for key in keys]}, indent=1)
        write_atomic(self.path, text, mode=0o600)


class KeyLimits:
    """The rate limits of a key in use: one bucket of requests, one of tokens.

    Args:
        folder: where processes share the levels of their buckets; None for one process.
    """

    def __init__(
        self, key: ApiKey, clock: Callable[[], float] = time.monotonic, folder: Path | None = None
    ) -> None:
        self.key = key
        self.requests = TokenBucket(key.requests_per_minute, clock)
        self.tokens = TokenBucket(key.tokens_per_minute, clock)
        self._shared = SharedLevels(folder / key.id, [self.requests, self.tokens]) if folder else None

    def exclusive(self) -> AbstractContextManager[None]:
        """A context in which the levels are current and no other process changes them."""
        return nullcontext() if self._shared is None else self._shared.exclusive()

    def charge(self, n_prompt: int = 0, max_output: int = 0) -> None:
        """Charge one request, its prompt tokens and its largest output.

        Raises:
            ApiError: 429, with the seconds to wait. The output may exceed what is available, the prompt may not.
        """
        with self.exclusive():
            for unit, bucket, amount in (("requests", self.requests, 1), ("tokens", self.tokens, n_prompt)):
                wait = bucket.seconds_until(amount)
                if wait > 0:
                    never = wait == math.inf
                    problem = f"this prompt of {n_prompt:,} tokens exceeds" if never else "over"
                    raise ApiError(
                        429,
                        f"{problem} the limit of {bucket.limit:,} {unit} per minute for the key {self.key.name!r}",
                        code="rate_limit_exceeded",
                        retry_after=60 if never else wait,
                        headers=self.headers,
                    )
            self.requests.consume(1)
            self.tokens.consume(n_prompt + max_output)

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
    """The keys of a file as the server uses them, reloaded when the file changes. folder: as in `KeyLimits`."""

    def __init__(
        self, path: Path, clock: Callable[[], float] = time.monotonic, folder: Path | None = None
    ) -> None:
        self.file, self.clock, self.folder = KeyFile(path), clock, folder
        self._limits_by_key: dict[str, KeyLimits] = {}
        self._file_state: object = None
        self._last_check = -math.inf
        self._file_state = self._stat()
        self._use(self.file.read())  # a damaged file is an error at the start

    def authenticate(self, key: str) -> KeyLimits | None:
        """Return the limits of a key, given its full text, or None if the key is unknown."""
        self._reload_if_changed()
        parts = key.split("-", 2)
        limits = self._limits_by_key.get(parts[1]) if len(parts) == 3 else None
        same = hmac.compare_digest(_hash(key), limits.key.hash if limits else DUMMY_HASH)
        return limits if same else None

    def is_valid(self, limits: KeyLimits) -> bool:
        """Return whether the key of these limits is still in the file."""
        self._reload_if_changed()
        current = self._limits_by_key.get(limits.key.id)
        return current is not None and current.key.hash == limits.key.hash

    def _reload_if_changed(self) -> None:
        now = self.clock()
        if now - self._last_check < RELOAD_SECONDS:
            return
        self._last_check = now
        if (file_state := self._stat()) == self._file_state:
            return
        self._file_state = file_state
        try:
            self._use(self.file.read())
        except ConfigError as error:
            LOG.error("%s; the keys that were read before stay valid", error.what)

    def _stat(self) -> object:
        try:
            status = self.file.path.stat()
        except OSError:
            return "gone"
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _use(self, keys: list[ApiKey]) -> None:
        fresh = {}
        for key in keys:
            old = self._limits_by_key.get(key.id)
            fresh[key.id] = (
                old if old is not None and old.key == key else KeyLimits(key, self.clock, self.folder)
            )
        self._limits_by_key = fresh


def _hash(key: str) -> str:
    return sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
