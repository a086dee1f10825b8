"""API keys: storage as hashes, authentication, rate limits."""

from __future__ import annotations

import functools
import json
import multiprocessing
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.serve.live_server import Gate, make_state, make_tiny_engine, running
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.errors import ConfigError
from whorl.serve.config import ServeConfig
from whorl.serve.middleware.auth import RELOAD_SECONDS, KeyFile, KeyStore
from whorl.serve.middleware.rate_limit import TokenBucket
from whorl.serve.server import check_auth_required

events = st.lists(st.tuples(st.floats(0, 30), st.floats(0.1, 300)), min_size=1, max_size=40)


@pytest.fixture
def file(tmp_path: Path) -> KeyFile:
    return KeyFile(tmp_path / "keys.json")


def test_key_file_stores_hashes_and_authenticates(file: KeyFile) -> None:
    alice, bob = file.add("alice", requests_per_minute=5), file.add("bob")
    assert alice not in file.path.read_text() and alice.split("-", 2)[2] not in file.path.read_text()
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    accounts = KeyStore(file.path)
    found = accounts.authenticate(alice)
    assert found is not None and found.key.name == "alice" and found.key.requests_per_minute == 5
    assert accounts.authenticate(bob) is not found
    wrong = ["", "wk", alice[:-1], alice + "x", alice.replace("wk-", "wx-", 1)]
    wrong += [f"wk-{'z' * 8}-abc", "\udcff-a-b"]
    assert not any(map(accounts.authenticate, wrong))
    with pytest.raises(ConfigError, match="taken"):
        file.add("alice")


def test_key_store_reloads_revoked_keys(file: KeyFile) -> None:
    now = [0.0]
    alice, bob = file.add("alice"), file.add("bob", requests_per_minute=2)
    accounts = KeyStore(file.path, clock=lambda: now[0])
    account = accounts.authenticate(bob)
    assert account is not None
    account.requests.consume(2)
    file.revoke("alice")
    assert accounts.authenticate(alice) is not None  # the file was not reloaded yet
    now[0] += RELOAD_SECONDS
    assert accounts.authenticate(alice) is None
    same = accounts.authenticate(bob)
    assert same is account and same.requests.seconds_until(1) > 0  # a reload does not reset the limits
    with pytest.raises(ConfigError, match="no key 'alice'"):
        file.revoke("alice")


SHORT_HASH = '{"keys": [{"id": "a", "name": "b", "hash": "c", "created": 1}]}'


@pytest.mark.parametrize("text", ["", "{", "[]", '{"keys": [{}]}', SHORT_HASH])
def test_key_file_rejects_damaged_files(file: KeyFile, text: str) -> None:
    file.path.write_text(text)
    with pytest.raises(ConfigError, match=r"keys\.json"):
        file.read()


@given(st.integers(1, 1000), events)
def test_token_bucket_never_exceeds_its_limit(limit: int, events: list[tuple[float, float]]) -> None:
    """The total is at most the initial level plus the refill."""
    now, taken = [0.0], 0.0
    bucket = TokenBucket(limit, lambda: now[0])
    for pause, amount in events:
        now[0] += pause
        wait = bucket.seconds_until(amount)
        if amount > limit:
            assert wait == float("inf")
            continue
        if wait > 0:
            now[0] += wait * 1.000001
            assert bucket.seconds_until(amount) <= 1e-3
        bucket.consume(amount)
        taken += amount
        assert taken <= (limit + now[0] * limit / 60) * 1.0001 + 0.1


def test_token_bucket_refills_a_debt() -> None:
    now = [0.0]
    bucket = TokenBucket(60, lambda: now[0])
    bucket.consume(90)
    assert bucket.seconds_until(1) == pytest.approx(31)
    now[0] += 31
    assert bucket.seconds_until(1) == 0
    assert TokenBucket(None).seconds_until(10**9) == 0


def test_server_requires_key_and_enforces_limits(file: KeyFile) -> None:
    key, free = file.add("small", requests_per_minute=2, tokens_per_minute=100), file.add("free")
    with running(make_state(key_file=file.path)) as server:

        def complete(headers: dict[str, str], n_prompt: int = 40) -> Any:
            body = {"model": "tiny", "prompt": [5] * n_prompt, "max_tokens": 10, "ignore_eos": True}
            return server.post("/v1/completions", json=body, headers=headers)

        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {key}"}):
            answer = complete(headers)
            assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/models", "/metrics", "/v1/engine/state"):
            assert server.get(path).status_code == 401
        assert server.get("/health").status_code == 200
        with pytest.raises(openai.AuthenticationError):
            server.client("no").models.list()
        own = {"authorization": f"Bearer {key}"}
        first = complete(own)
        assert first.status_code == 200 and first.headers["x-ratelimit-limit-requests"] == "2"
        assert server.api.key_store is not None
        account = server.api.key_store.authenticate(key)
        assert account is not None and 49 <= account.tokens.available <= 100  # 40 prompt and 10 output tokens
        second = complete(own, 90)
        assert second.status_code == 429 and second.json()["error"]["type"] == "rate_limit_error"
        assert int(second.headers["retry-after"]) >= 1 and "x-ratelimit-remaining-tokens" in second.headers
        never = complete(own, 101)
        assert never.status_code == 429 and "exceeds" in never.json()["error"]["message"]
        client = server.client(key)
        client.completions.create(model="tiny", prompt=[5], max_tokens=1)
        with pytest.raises(openai.RateLimitError):
            client.embeddings.create(model="tiny", input=[[5]])
        assert server.client(free).completions.create(model="tiny", prompt=[5], max_tokens=1).choices


def test_check_auth_required_for_public_hosts(file: KeyFile) -> None:
    check_auth_required(ServeConfig())
    check_auth_required(ServeConfig(host="::1"))
    check_auth_required(ServeConfig(host="0.0.0.0"), no_auth=True)
    with pytest.raises(ConfigError, match="does not exist"):
        check_auth_required(ServeConfig(key_file=file.path))
    file.add("alice")
    check_auth_required(ServeConfig(host="0.0.0.0", key_file=file.path))
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ConfigError, match="reachable from other machines"):
            check_auth_required(ServeConfig(host=host))


def test_keys_verb_adds_lists_and_revokes(file: KeyFile) -> None:
    def keys(*words: str) -> Any:
        return CliRunner().invoke(build_app(), ["keys", *words, "--file", str(file.path)])

    made, listed = keys("add", "alice", "--requests-per-minute", "7"), keys("list")
    assert made.exit_code == 0 and KeyStore(file.path).authenticate(made.stdout.strip()) is not None
    assert "alice" in listed.stdout and "7 requests/min" in listed.stdout
    assert made.stdout.strip() not in listed.stdout
    assert keys("revoke", "alice").exit_code == 0
    assert json.loads(file.path.read_text()) == {"keys": []}
    assert keys("revoke", "alice").exit_code == 2


def _add_and_revoke(path: str, first: int) -> None:
    for n in range(first, first + 5):
        KeyFile(Path(path)).add(f"key {n}")
        if n % 2:
            KeyFile(Path(path)).revoke(f"key {n}")


def test_concurrent_changes_of_key_file_lose_none(file: KeyFile) -> None:
    children = [
        multiprocessing.Process(target=_add_and_revoke, args=(str(file.path), 5 * k)) for k in range(4)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert {key.name for key in file.read()} == {f"key {n}" for n in range(0, 20, 2)}


def test_damaged_key_file_keeps_keys_and_is_logged(file: KeyFile, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    key = file.add("alice")
    accounts = KeyStore(file.path, clock=lambda: now[0])
    file.path.write_text("{")
    for _ in range(3):
        now[0] += RELOAD_SECONDS
        assert accounts.authenticate(key) is not None
    assert len(caplog.records) == 1 and "not a valid key file" in caplog.text


def test_stream_of_revoked_key_ends_within_a_second(file: KeyFile) -> None:
    key, engine = file.add("alice"), make_tiny_engine()
    with running(make_state(engine, key_file=file.path)) as server:
        gate = Gate(engine)
        gate.let(2)
        body = {"model": "tiny", "prompt": [5], "max_tokens": 50, "stream": True, "ignore_eos": True}
        url, headers = f"{server.url}/v1/completions", {"authorization": f"Bearer {key}"}
        with httpx.stream("POST", url, json=body, headers=headers, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            file.revoke("alice")
            revoked = time.monotonic()
            *_, last = (line for line in lines if line)
            assert time.monotonic() - revoked < 2  # a second, and another for a busy machine
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "invalid_api_key"
        gate.let(10_000)


def test_limits_hold_over_processes(file: KeyFile, tmp_path: Path) -> None:
    """Three replicas with one folder allow what one server allows; without it each has limits of its own."""
    key, now = file.add("alice", requests_per_minute=6, tokens_per_minute=600), [0.0]

    def allowed(folder: Path | None) -> int:
        replicas = [KeyStore(file.path, lambda: now[0], folder).authenticate(key) for _ in range(3)]
        n = 0
        for k in range(30):
            limits = replicas[k % 3]
            assert limits is not None
            with limits.exclusive():
                if limits.requests.seconds_until(1) == 0 and limits.tokens.seconds_until(10) == 0:
                    limits.requests.consume(1)
                    limits.tokens.consume(10)
                    n += 1
        return n

    assert allowed(None) == 18
    assert allowed(tmp_path) == 6
    now[0] += 30
    assert allowed(tmp_path) == 3


def test_output_is_charged_before_it_starts_and_refunded(file: KeyFile) -> None:
    key, engine = file.add("alice", tokens_per_minute=1000), make_tiny_engine()
    with running(make_state(engine, key_file=file.path)) as server:
        gate, client = Gate(engine), server.client(key)
        gate.let(3)
        stream = client.completions.create(model="tiny", prompt=[5], max_tokens=120, n=8, stream=True)
        next(iter(stream))
        large = functools.partial(
            client.completions.create, model="tiny", prompt=[[5] * 100] * 8, max_tokens=1
        )
        with pytest.raises(
            openai.RateLimitError
        ):  # 8 x 121 of 1,000 tokens are reserved: 46 s until 808 are free
            large()
        stream.close()
        while server.api.worker.streams:  # until the server sees that the client has gone
            gate.let(1)
            time.sleep(0.1)
        gate.let(10_000)
        large()


def test_priority_and_queue_of_a_key_are_bounded(file: KeyFile) -> None:
    key, engine = file.add("alice"), make_tiny_engine()
    favoured = file.add("bob", min_priority=-5)
    with running(make_state(engine, key_file=file.path, max_queue=8)) as server:
        for owner, priority, status in (
            (key, -1, 403),
            (key, 3, 200),
            (favoured, -5, 200),
            (favoured, -6, 403),
        ):
            body = {"model": "tiny", "prompt": [5], "max_tokens": 1, "priority": priority}
            answer = server.post("/v1/completions", json=body, headers={"authorization": f"Bearer {owner}"})
            assert answer.status_code == status
        gate = Gate(engine)
        ask = functools.partial(server.client(key).completions.create, model="tiny", prompt=[5], max_tokens=2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, n=4)
            while len(server.api.worker.streams) < 4:
                time.sleep(0.01)
            with pytest.raises(openai.InternalServerError, match="half of the queue"):
                ask()
            other = pool.submit(
                server.client(favoured).completions.create, model="tiny", prompt=[5], max_tokens=2
            )
            gate.let(10_000)
            assert len(waiting.result().choices) == 4 and other.result().choices
