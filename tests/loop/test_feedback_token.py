"""Tokens of completions, and the file of their secret."""

from __future__ import annotations

import threading

import pytest

from whorl.errors import ConfigError
from whorl.loop.feedback_token import FeedbackClaim, FeedbackTokenError, issue_token, load_secret

SECRET = bytes(range(32))


def test_a_token_returns_its_claim():
    token = issue_token(SECRET, "chatcmpl-1", 2, "ada/ü", expires=2e9)
    assert FeedbackClaim.read(SECRET, token) == FeedbackClaim("chatcmpl-1", 2, "ada/ü", 2_000_000_000)


def test_no_token_of_another_secret_or_content_is_valid():
    token = issue_token(SECRET, "chatcmpl-1", 2, "ada")
    content, mark = token.split(".")
    other = issue_token(SECRET, "chatcmpl-1", 2, "bob").split(".")[0]
    flipped = mark[:5] + ("A" if mark[5] != "A" else "B") + mark[6:]
    reasons = {}
    for name, bad in {
        "secret": issue_token(bytes(32), "chatcmpl-1", 2, "ada"), "content": f"{other}.{mark}",
        "mark": f"{content}.{flipped}", "half": token[:-9], "empty": "", "umlaut": "ü.ü", "dots": "...",
    }.items():  # fmt: skip
        with pytest.raises(FeedbackTokenError) as found:
            FeedbackClaim.read(SECRET, bad)
        reasons[name] = found.value.reason
    forged = dict.fromkeys(("secret", "content", "mark"), "forged")
    assert reasons == forged | dict.fromkeys(("half", "empty", "umlaut", "dots"), "unknown")


def test_a_token_expires():
    token = issue_token(SECRET, "c", 1, "ada", expires=1000)
    assert FeedbackClaim.read(SECRET, token, now=1000).actor == "ada"
    with pytest.raises(FeedbackTokenError, match="expired"):
        FeedbackClaim.read(SECRET, token, now=1001)


def test_servers_that_start_together_share_one_secret(tmp_path):
    path, found = tmp_path / "log" / "secret", list[bytes]()
    threads = [threading.Thread(target=lambda: found.append(load_secret(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1 and len(found[0]) == 32
    assert path.stat().st_mode & 0o777 == 0o600 and [p.name for p in path.parent.iterdir()] == ["secret"]
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        load_secret(path)
