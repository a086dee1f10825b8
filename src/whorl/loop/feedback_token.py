"""Tokens that let a client give feedback on one completion; the server stores none.

    token = issue_token(secret, "chatcmpl-1", choices=2, actor="ada")
    FeedbackClaim.read(secret, token)              # completion, choices, actor, expires

A token is base64url(JSON of [completion, choices, actor, expires]), a dot, and base64url(HMAC-SHA256 of the part before).
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import orjson

from whorl.errors import ConfigError, DataError

TOKEN_SECONDS = 30 * 86400
SECRET_BYTES = 32


class FeedbackTokenError(DataError):
    """A token is of no use. reason: "unknown" if it has no token's form, else "forged" or "expired"."""

    def __init__(self, reason: Literal["unknown", "forged", "expired"], what: str) -> None:
        self.reason = reason
        super().__init__(what, expected="the token of a completion of this server")


@dataclass(frozen=True)
class FeedbackClaim:
    """The content of a token. expires: seconds since 1970."""

    completion: str
    choices: int
    actor: str
    expires: int

    @classmethod
    def read(cls, secret: bytes, token: str, now: float | None = None) -> FeedbackClaim:
        """Return the claim of a token. Raises FeedbackTokenError."""
        try:
            content, _, mark = token.encode("ascii").partition(b".")
            given = base64.urlsafe_b64decode(mark + b"==")
        except ValueError:
            raise FeedbackTokenError("unknown", "the token has characters that no token has") from None
        if len(given) != 32:
            raise FeedbackTokenError("unknown", "the token is not complete")
        if not hmac.compare_digest(given, hmac.digest(secret, content, "sha256")):
            raise FeedbackTokenError("forged", "the token was not made by this server")
        claim = cls(*orjson.loads(base64.urlsafe_b64decode(content + b"==")))
        if claim.expires < (time.time() if now is None else now):
            raise FeedbackTokenError("expired", "the token has expired")
        return claim


def issue_token(
    secret: bytes, completion: str, choices: int, actor: str, expires: float | None = None
) -> str:
    """Return the token of a completion. expires: seconds since 1970; default: in `TOKEN_SECONDS`."""
    until = int(time.time() + TOKEN_SECONDS if expires is None else expires)
    content = base64.urlsafe_b64encode(orjson.dumps([completion, choices, actor, until])).rstrip(b"=")
    mark = base64.urlsafe_b64encode(hmac.digest(secret, content, "sha256")).rstrip(b"=")
    return (content + b"." + mark).decode()


def load_secret(path: Path) -> bytes:
    """Return the secret of a file that only its owner reads; make it if the file does not exist.

    Raises:
        ConfigError: the file has another size.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        own = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        with os.fdopen(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(SECRET_BYTES))
        with contextlib.suppress(FileExistsError):  # another server was faster
            os.link(own, path)
        own.unlink()
    secret = path.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} has {len(secret)} bytes", expected=f"a secret of {SECRET_BYTES}",
            do="remove it; tokens that were issued become invalid",
        )  # fmt: skip
    return secret
