"""Model loading: folders, embedders, cache sizes, and errors before the server listens."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.serve.live_server import make_tiny_decoder, make_tokenizer, running
from typer.testing import CliRunner

import whorl
from whorl.cli import build_app
from whorl.embedding.embedder import Embedder
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.errors import ConfigError, StoreError
from whorl.evals.model.engine_backend import EngineBackend
from whorl.machine.device_probe import probe
from whorl.models import save_model
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.transformer import Transformer
from whorl.serve.app_state import AppState
from whorl.serve.config import ServeConfig
from whorl.serve.server import bind_socket
from whorl.serve.worker import model_loading
from whorl.serve.worker.model_loading import ModelLocation

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models") / "small"
    tokenizer = make_tokenizer(())
    save_model(make_tiny_decoder(tokenizer), found)
    tokenizer.save(found)
    return found


def load(folder: Path, max_model_len: int = 64, **settings: Any) -> tuple[Any, Any]:
    """The served model of a folder and its engine."""
    place, sizes = ModelLocation(str(folder), None), EngineConfig(max_num_seqs=4, block_size=16)
    settings["max_model_len"] = max_model_len
    (served,), engine = model_loading.load_generation_model(place, MACHINE, sizes, **settings)
    return served, engine


def test_model_folder_is_served_under_its_names(folder: Path) -> None:
    place = ModelLocation(str(folder), None)
    assert place.kind == "model" and place.names == ["small", str(folder)]
    assert ModelLocation(str(folder), None, "other").names[0] == "other"
    served, engine = load(folder, max_model_len=100, cache_bytes=1 << 20)
    assert served.max_model_len == 100 and not served.chat_template.is_trained
    with running(AppState(ServeConfig(port=0), [served], engine)) as server:
        for model in ("small", str(folder)):
            answer = server.post("/v1/completions", json={"model": model, "prompt": "def ", "max_tokens": 3})
            assert answer.status_code == 200 and answer.json()["model"] == "small"
        assert server.get(f"/v1/models/{folder}").status_code == 200
        state = server.get("/v1/engine/state").json()
        assert state["model"] == "small" and sum(n for _, n in state["page_map"]) == state["pages"]["total"]
        assert len(state["batches"]) == engine.stats.steps and len(state["latencies"]["ttft"]) == 2


def test_load_generation_model_sizes_the_kv_cache(folder: Path) -> None:
    _, engine = load(folder, cache_bytes=1 << 30)
    assert engine.cache.groups[0].pool.n_pages == 4 * 64 // 16  # 4 sequences of 64 positions
    each = engine.model.kv_bytes_per_token()
    served, engine = load(folder, cache_bytes=48 * each)
    assert engine.cache.groups[0].pool.n_pages == 3 and served.max_model_len == 48
    with pytest.raises(ConfigError, match="15 positions"):
        load(folder, cache_bytes=15 * each)


def test_embedder_only_server_rejects_generation(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(())
    config = EncoderConfig(vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, n_heads=2, mlp_hidden=64)
    embedder = Embedder(Encoder(config), tokenizer)
    embedder.save(tmp_path)
    place = ModelLocation.__new__(ModelLocation)
    place.folder, place.kind, place.names = tmp_path, "embedder", ["vectors"]
    served = model_loading.load_embedder(place, MACHINE)
    with running(AppState(ServeConfig(port=0), [served], None)) as server:

        def post(path: str, **fields: Any) -> Any:
            return server.post(f"/v1/{path}", json={"model": "vectors", **fields})

        texts = ["return a + b", "class Stack"]
        found = np.array([one["embedding"] for one in post("embeddings", input=texts).json()["data"]])
        assert np.allclose(found, embedder.embed(texts), atol=1e-6)
        messages = [{"role": "user", "content": "x"}]
        completion, response = post("completions", prompt="x"), post("responses", input="x")
        for answer in (completion, response, post("chat/completions", messages=messages)):
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        for path in ("health", "metrics", "v1/engine/state", "v1/models"):
            assert server.get(f"/{path}").status_code == 200


def test_serve_rejects_bad_model_host_and_port(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(StoreError):
        ModelLocation("nothing", str(tmp_path))
    far = CliRunner().invoke(build_app(), ["serve", str(folder), "--host", "0.0.0.0"])
    assert far.exit_code == 2 and "reachable from other machines" in far.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind_socket(ServeConfig(port=port))


def test_declared_length_is_default_and_bound(tmp_path: Path) -> None:
    """A folder with max_position_embeddings of 48: every entrance has that bound; an option exceeds it and warns."""
    tokenizer = make_tokenizer(())
    model = make_tiny_decoder(tokenizer)
    declared = model.config.model_copy(update={"max_length": 48, "trained_length": None})
    save_model(Transformer(declared, torch.Generator().manual_seed(0)), tmp_path)
    tokenizer.save(tmp_path)
    place, sizes = ModelLocation(str(tmp_path), None), EngineConfig(max_num_seqs=4, block_size=16)
    (served,), engine = model_loading.load_generation_model(place, MACHINE, sizes)
    assert served.max_model_len == engine.max_positions == 48
    assert Engine(engine.model).max_positions == 48
    assert EngineBackend.open(tmp_path).max_length == 48
    assert engine.model.eval_window == 48
    api = whorl.load(tmp_path)
    for call in (api.generate, api.embed, api.log_probs):
        with pytest.raises(ConfigError, match=r"at most 4[78]"):
            call("word " * 99)
    for longer in (
        lambda: load(tmp_path, max_model_len=80)[0].max_model_len,
        lambda: whorl.load(tmp_path, context=80).engine.max_positions,
        lambda: EngineBackend.open(tmp_path, max_length=80).max_length,
        lambda: Engine(engine.model, EngineConfig.for_batch(2, 80)).max_positions,  # rollouts
    ):
        with pytest.warns(UserWarning, match="80 positions exceed the 48 that the model declares"):
            assert longer() == 80
