"""`whorl serve --prefill --decode`: tokens over HTTP equal those of one engine, and errors reach the client."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.serve.live_server import Running, make_tiny_decoder, make_tokenizer, running
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.engine.config import EngineConfig
from whorl.errors import ConfigError
from whorl.machine.device_probe import probe
from whorl.models import Transformer, save_model
from whorl.models.transformer_config import CustomMixer, TransformerConfig
from whorl.serve.app_state import AppState
from whorl.serve.config import ServeConfig
from whorl.serve.worker.disaggregated import DisaggregatedEngine
from whorl.serve.worker.disaggregated_model import ModelEngineFactory, load_disaggregated_model
from whorl.serve.worker.model_loading import ModelLocation

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")
LONG = "def add(a, b):\n    return a + b\n" * 12
PROMPTS: list[dict[str, Any]] = [
    {"prompt": LONG, "temperature": 0},
    {"prompt": LONG + "class ", "temperature": 1.0, "seed": 7},
    {"prompt": "def ", "temperature": 0.8, "seed": 3, "n": 2},
    {"prompt": list(range(5, 200)), "temperature": 0, "logprobs": 2},
    {"prompt": LONG, "temperature": 0, "regex": "[a-z]{3,8}"},
]


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> ModelEngineFactory:
    folder, tokenizer = tmp_path_factory.mktemp("models") / "small", make_tokenizer(())
    save_model(make_tiny_decoder(tokenizer), folder)
    tokenizer.save(folder)
    sizes = EngineConfig(max_num_seqs=4, block_size=16)
    return ModelEngineFactory(ModelLocation(str(folder), None), MACHINE, sizes, 512, 1 << 24)


@pytest.fixture(scope="module")
def servers(factory: ModelEngineFactory) -> Iterator[tuple[Running, Running, DisaggregatedEngine]]:
    models, plain = factory.load()
    ours, engine = load_disaggregated_model(factory, 1, 1, min_prefill_tokens=32)
    with (
        engine,
        running(AppState(ServeConfig(port=0), models, plain)) as one,
        running(AppState(ServeConfig(port=0), ours, engine)) as other,
    ):
        yield one, other, engine


def test_completions_equal_those_of_one_engine(servers: tuple[Running, Running, DisaggregatedEngine]) -> None:
    one, other, engine = servers
    for fields in PROMPTS:
        body = {"model": "small", "max_tokens": 24, **fields}
        want, got = (server.post("/v1/completions", json=body, timeout=60) for server in (one, other))
        assert want.status_code == got.status_code == 200, got.text
        texts = [[choice["text"] for choice in answer.json()["choices"]] for answer in (want, got)]
        assert texts[0] == texts[1] and all(texts[0])
        assert want.json()["usage"]["completion_tokens"] == got.json()["usage"]["completion_tokens"]
    assert engine.n_transferred >= 2 and engine.n_rejected_blocks == 0
    streamed = "".join(
        part.choices[0].text
        for part in other.client().completions.create(
            model="small", prompt=LONG, max_tokens=24, temperature=0, stream=True
        )
    )
    body = {"model": "small", "prompt": LONG, "max_tokens": 24, "temperature": 0}
    assert streamed == one.post("/v1/completions", json=body).json()["choices"][0]["text"]


def test_invalid_requests_get_the_same_status(servers: tuple[Running, Running, DisaggregatedEngine]) -> None:
    one, other, _ = servers
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "?"}}}
    bad: list[dict[str, Any]] = [
        {"prompt": [1] * 600, "max_tokens": 4},
        {"prompt": [10**6], "max_tokens": 4},
        {"prompt": "x", "max_tokens": 4, "response_format": schema},
    ]
    for fields in bad:
        want, got = (
            server.post("/v1/completions", json={"model": "small", **fields}) for server in (one, other)
        )
        assert want.status_code == got.status_code == 400, got.text
    for path in ("health", "metrics", "v1/engine/state", "v1/models"):
        assert other.get(f"/{path}").status_code == 200
    body = {"model": "small", "input": "x"}
    assert other.post("/v1/embeddings", json=body).status_code == 400


def test_models_that_cannot_be_split_are_refused(factory: ModelEngineFactory, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(())
    mixers: dict[str, Any] = {"linear": CustomMixer(kind="linear", options={"n_heads": 4})}
    config = TransformerConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, n_layers=1, mlp_hidden=64, mixers=mixers
    )
    save_model(Transformer(config, generator=torch.Generator().manual_seed(0)), tmp_path)
    tokenizer.save(tmp_path)
    recurrent = dataclasses.replace(factory, location=ModelLocation(str(tmp_path), None))
    with pytest.raises(ConfigError, match="recurrent layers") as caught:
        load_disaggregated_model(recurrent)
    assert "--replicas" in str(caught.value.do)
    vectors = ModelLocation.__new__(ModelLocation)
    vectors.folder, vectors.kind, vectors.names = tmp_path, "embedder", ["vectors"]
    with pytest.raises(ConfigError, match="vectors is not a language model but an embedder"):
        load_disaggregated_model(dataclasses.replace(factory, location=vectors))
    tight = dataclasses.replace(factory, cache_bytes=1)
    with pytest.raises(ConfigError, match="KV cache"):
        load_disaggregated_model(tight)
    wrong = CliRunner().invoke(build_app(), ["serve", str(tmp_path), "--prefill", "-1"])
    assert wrong.exit_code == 2 and "--prefill" in wrong.output
