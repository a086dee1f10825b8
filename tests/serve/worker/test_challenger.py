"""Two models under one name, and a name of the store that moves while a server runs."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.serve.live_server import Gate, Running, make_tiny_decoder, make_tokenizer, running
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.engine.config import EngineConfig
from whorl.errors import ConfigError
from whorl.loop.events import COMPLETIONS
from whorl.machine.device_probe import probe
from whorl.models import save_model
from whorl.models.transformer import Transformer
from whorl.serve.app_state import AppState
from whorl.serve.config import EventLogConfig, ServeConfig
from whorl.serve.server import make_state
from whorl.serve.worker import served_name
from whorl.serve.worker.disaggregated_model import ModelEngineFactory
from whorl.serve.worker.several_models import find_challenger, find_models, load_models, promoted_name
from whorl.store import Build, Store
from whorl.tokens.tokenizer import Tokenizer

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")
SIZES = EngineConfig(max_num_seqs=4, block_size=16)
BODY = {"prompt": "def add(a", "max_tokens": 12, "seed": 3, "store": True}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A store with three models: b has other weights than a, wide another shape, foreign another tokenizer."""
    store, tokenizer = Store(tmp_path), make_tokenizer()
    store.make_folders()
    base = make_tiny_decoder(tokenizer)
    for n, name in enumerate(("a", "b", "wide", "foreign")):
        model, words = base, tokenizer
        if name == "foreign":
            words = Tokenizer.train(["other words " * 20], 280)
        if name != "a":
            more = {
                "wide": {"n_layers": base.config.n_layers + 1},
                "foreign": {"vocab_size": words.vocab_size},
            }
            config = base.config.model_copy(update=more.get(name, {}))
            model = Transformer(config, torch.Generator().manual_seed(n)).eval()
        with Build(store, kind="model", name=f"{name}/m", parents={}, config={"n": name}, version=1) as build:
            save_model(model, build.path)
            words.save(build.path)
    store.set_name("served/chat", store.open("a/m"))
    return tmp_path


def serve(home: Path, ref: str, is_open: bool = False, **fields: Any) -> AppState:
    events = EventLogConfig(log=True, **fields)
    places = find_models([ref], str(home))
    if events.challenger:
        places.append(find_challenger(events.challenger, str(home), places[0]))
    models, engine = load_models(places, ModelEngineFactory(places[0], MACHINE, SIZES, 256, 1 << 20))
    return make_state(ServeConfig(port=0), events, places, models, engine, is_open=is_open)


def test_a_server_that_starts_after_a_promotion_serves_the_promoted_model(home: Path) -> None:
    store = Store(home)
    assert promoted_name("a/m", str(home)) == "a/m"
    store.set_name("served/a/m", store.open("b/m"))
    assert promoted_name("a/m", str(home)) == promoted_name("served/a/m", str(home)) == "served/a/m"
    [place] = find_models(["served/a/m"], str(home))
    assert place.address == store.open("b/m").address and place.names[:2] == ["a/m", "m"]
    assert promoted_name("b/m", str(home)) == "b/m"


def test_an_open_server_shows_no_texts_of_users(home: Path) -> None:
    for is_open, status in ((False, 200), (True, 404)):
        with running(serve(home, "a/m", is_open=is_open)) as server:
            for path in ("/feed", "/v1/feed", "/v1/loop/state"):
                assert server.get(path).status_code == status
            assert server.post("/v1/feedback", json={"token": "x", "kind": "like"}).status_code == 404


def ask(server: Running, model: str, **fields: Any) -> dict[str, Any]:
    return server.post("/v1/completions", json={"model": model, **BODY, **fields}, timeout=60).json()


def alone(home: Path, ref: str) -> str:
    with running(serve(home, ref)) as server:
        return ask(server, ref)["choices"][0]["text"]


def logged(server: Running) -> dict[str, dict[str, Any]]:
    assert server.api.events is not None
    records = server.api.events.log.replay(COMPLETIONS)
    return {(event := record.event()).id: dict(event.data or {}) for record in records}


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_response_names_the_arm_that_answered(home: Path) -> None:
    texts = {"champion": alone(home, "a/m"), "challenger": alone(home, "b/m")}
    assert texts["champion"] != texts["challenger"]
    with running(serve(home, "a/m", challenger="b/m", traffic=0.3)) as server:
        assert [m["id"] for m in server.get("/v1/models").json()["data"]] == ["a/m"]
        actors = {f"actor {i}": [ask(server, "a/m", user=f"actor {i}") for _ in range(2)] for i in range(12)}
        chat = {
            "model": "a/m",
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 4,
            "store": True,
        }
        sides = [
            chat | {"metadata": {"pair": f"p{i}", "side": s}} for i in range(6) for s in ("left", "right")
        ]
        pairs = [server.post("/v1/chat/completions", json=body).json() for body in sides]
        found = logged(server)
        digests = {"champion": Store(home).open("a/m").address, "challenger": Store(home).open("b/m").address}
        assert "challenger" not in server.get("/metrics").text
    fields = {"id", "object", "created", "model", "system_fingerprint", "choices", "usage", "feedback"}
    for answers in actors.values():
        arm = found[answers[0]["id"]]["arm"]
        for answer in answers:
            assert answer.keys() == fields and answer["model"] == "a/m"
            assert answer["choices"][0]["text"] == texts[arm]
            assert (found[answer["id"]]["arm"], found[answer["id"]]["digest"]) == (arm, digests[arm])
    share = sum(found[answers[0]["id"]]["arm"] == "challenger" for answers in actors.values()) / len(actors)
    assert share < 0.7
    arms = [found[answer["id"]]["arm"] for answer in pairs]
    assert all({left, right} == set(digests) for left, right in zip(arms[::2], arms[1::2], strict=True))
    assert len(set(arms[::2])) == 2


def test_a_challenger_with_another_tokenizer_is_refused(home: Path) -> None:
    (place,) = find_models(["a/m"], str(home))
    with pytest.raises(ConfigError, match="challenger foreign/m"):
        find_challenger("foreign/m", str(home), place)
    run = CliRunner().invoke(build_app(), ["serve", "a/m", "--challenger", "b/m", "--store", str(home)])
    assert run.exit_code != 0 and "need --log" in run.output + run.stderr


def test_a_server_takes_over_the_weights_of_a_name(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(served_name, "POLL_SECONDS", 0.01)
    store, new = Store(home), alone(home, "b/m")
    state = serve(home, "served/chat")
    gate, weights = Gate(state.worker.engine), state.models[0].weights
    with running(state) as server:
        endless = {"ignore_eos": True, "max_tokens": 200}
        long = list[dict[str, Any]]()
        thread = threading.Thread(target=lambda: long.append(ask(server, "chat", **endless)))
        thread.start()
        gate.let(4)  # the completion runs while the name moves
        until(lambda: any(stream.n_tokens > 1 for stream in server.api.worker.streams.values()))
        store.set_name("served/chat", store.open("b/m"))
        until(lambda: weights.digest == "")
        until(lambda: gate.let(1) or weights.digest == store.open("b/m").address)  # type: ignore[func-returns-value]
        gate.let(10_000)
        thread.join(60)
        assert long[0]["usage"]["completion_tokens"] == 200 and logged(server)[long[0]["id"]]["digest"] == ""
        answer = ask(server, "served/chat")  # its other name
        assert (answer["choices"][0]["text"], answer["model"]) == (new, "chat")
        assert logged(server)[answer["id"]]["digest"] == store.open("b/m").address
        for refused in ("wide/m", "foreign/m"):
            store.set_name("served/chat", store.open(refused))
            until(lambda refused=refused: store.open(refused).address[:12] in caplog.text)
            assert ask(server, "chat")["choices"][0]["text"] == new
        assert caplog.text.count("keeps its model") == 2
