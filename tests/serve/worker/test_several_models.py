"""Several models in one server, LoRA adapters of artifacts, and a chat template from a file."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.support.serve.live_server import make_tiny_decoder, make_tokenizer, running
from typer.testing import CliRunner

from whorl.cli import build_app
from whorl.embedding.embedder import Embedder
from whorl.engine.config import EngineConfig
from whorl.errors import ConfigError, DataError, StoreError
from whorl.machine.device_probe import probe
from whorl.models import save_model
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.lora import ADAPTER, LoRA, init_lora, save_lora
from whorl.models.transformer import Transformer
from whorl.serve.app_state import AppState
from whorl.serve.config import ServeConfig
from whorl.serve.worker.disaggregated_model import ModelEngineFactory
from whorl.serve.worker.engine_group import EngineGroup
from whorl.serve.worker.several_models import find_models, load_models
from whorl.store import Build, Store
from whorl.store.manifest import FILE_NAME

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")
SIZES = EngineConfig(max_num_seqs=4, block_size=16)
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def adapter_of(model: Transformer) -> LoRA:
    """An adapter that changes the output."""
    lora, noise = init_lora(model, 2, 4.0), torch.Generator().manual_seed(1)
    for part in lora.factors.values():
        part.b.add_(torch.randn(part.b.shape, generator=noise))
    return lora


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two models, an embedder, and a model with an adapter next to it."""
    folder = tmp_path_factory.mktemp("home")
    store = Store(folder)
    store.make_folders()
    tokenizer, config = (
        make_tokenizer(),
        EncoderConfig(vocab_size=300, d_model=32, n_layers=1, n_heads=2, mlp_hidden=64),
    )
    base = make_tiny_decoder(tokenizer)
    for name in ("a/pretrain", "b/pretrain", "a/sft", "a/vectors"):
        kind = "embedder" if name == "a/vectors" else "model"
        with Build(store, kind=kind, name=name, parents={}, config={"n": name}, version=1) as build:
            if kind == "embedder":
                config = config.model_copy(update={"vocab_size": tokenizer.vocab_size})
                Embedder(Encoder(config), tokenizer).save(build.path)
                continue
            model = base
            if name == "b/pretrain":
                model = Transformer(base.config, torch.Generator().manual_seed(5)).eval()
            save_model(model, build.path)
            tokenizer.save(build.path)
            if name == "a/sft":
                save_lora(adapter_of(base), build.path / ADAPTER, base=store.open("a/pretrain").path.name)
    return folder


def load(home: Path, *refs: str, cache: int | None = 1 << 20, **fields: Any) -> tuple[list[Any], Any]:
    places = find_models(refs, str(home))
    fields["adapters"] = tuple(places[0].adapter(text) for text in fields.get("adapters", ()))
    make = ModelEngineFactory(places[0], MACHINE, SIZES, 256, cache, **fields)
    return load_models(places, make)


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[Any]:
    models, engine = load(home, "a/pretrain", "a/vectors", "b/pretrain", cache=1 << 18)
    with running(AppState(ServeConfig(port=0), models, engine)) as one:
        yield one


def test_two_models_share_the_memory_and_answer_by_name(home: Path, server: Any) -> None:
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["a/pretrain", "b/pretrain", "a/vectors"]
    group = server.api.worker.engine
    assert isinstance(group, EngineGroup) and list(group.engines) == ["a/pretrain", "b/pretrain"]
    each = group.engines["a/pretrain"].model.kv_bytes_per_token()
    for engine in group.engines.values():
        pool = engine.cache.groups[0].pool
        assert pool.n_pages * pool.page_size == pytest.approx((1 << 17) / each, abs=16)

    def complete(model: str, **fields: Any) -> Any:
        body = {"model": model, "prompt": "def ", "max_tokens": 12, "temperature": 0, **fields}
        return server.post("/v1/completions", json=body).json()

    texts = {}
    for name in ("a/pretrain", "b/pretrain"):
        (alone,), engine = load(home, name)
        with running(AppState(ServeConfig(port=0), [alone], engine)) as one:
            body = {"model": name, "prompt": "def ", "max_tokens": 12, "temperature": 0}
            texts[name] = one.post("/v1/completions", json=body).json()["choices"][0]["text"]
        found = complete(name)
        assert found["model"] == name and found["choices"][0]["text"] == texts[name]
    assert texts["a/pretrain"] != texts["b/pretrain"]
    assert complete("b/pretrain", regex="[0-9]{3}")["choices"][0]["text"].isdigit()
    error = complete("c")["error"]
    assert "available: 'a/pretrain', 'b/pretrain', 'a/vectors'" in error["message"]
    assert complete("pretrain")["error"]["code"] == "model_not_found"  # two models have this last part
    vectors = {"model": "vectors", "input": ["x"]}
    assert server.post("/v1/embeddings", json=vectors).status_code == 200
    state = server.get("/v1/engine/state", params={"model": "b/pretrain"}).json()
    assert state["model"] == "b/pretrain" and len(state["batches"]) == group.engines["b/pretrain"].stats.steps
    assert server.get("/v1/engine/state").json()["model"] == "a/pretrain"
    steps = sum(engine.stats.steps for engine in group.engines.values())
    metrics = server.get("/metrics").text
    assert f"whorl_engine_steps {steps}.0" in metrics and "acceptance_rate" not in metrics
    assert server.get("/health").json()["evicted_tokens"] == 0


def test_closed_request_is_aborted_in_its_engine(server: Any) -> None:
    for name in ("b/pretrain", "a/pretrain"):
        body = {"model": name, "prompt": "def ", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    server.wait(server.api.wait_drained())
    for engine in server.api.worker.engine.engines.values():
        server.ask(lambda _, engine=engine: engine.check_integrity())


def test_adapter_of_an_artifact_is_served_under_its_names(home: Path) -> None:
    models, engine = load(home, "a/pretrain", adapters=["a/sft", "other=a/sft"])
    assert [model.name for model in models] == ["a/pretrain", "a/sft", "other"]
    with running(AppState(ServeConfig(port=0), models, engine)) as one:
        texts = {}
        for name in ("a/pretrain", "a/sft", "sft", "other"):
            body = {"model": name, "prompt": "def ", "max_tokens": 12, "temperature": 0}
            texts[name] = one.post("/v1/completions", json=body).json()["choices"][0]["text"]
    assert texts["a/sft"] == texts["sft"] == texts["other"] != texts["a/pretrain"]
    alone, engine = load(home, "a/sft")  # its adapter is merged
    copy, both = load(home, "a/sft", adapters=["tuned=a/sft"])  # the base model lies next to the adapter
    assert [model.name for model in copy] == ["a/sft", "tuned"]
    cases = (alone, engine, "a/sft", "sft"), (copy, both, "a/sft", "a/pretrain"), (copy, both, "tuned", "sft")
    for found, made, name, want in cases:
        with running(AppState(ServeConfig(port=0), found, made)) as one:
            body = {"model": name, "prompt": "def ", "max_tokens": 12, "temperature": 0}
            assert one.post("/v1/completions", json=body).json()["choices"][0]["text"] == texts[want]
    folder = Store(home).open("a/sft").path / ADAPTER
    plain, _ = load(home, "b/pretrain", adapters=[f"any={folder}"])  # a folder states no base that is checked
    assert plain[1].name == "any"


def test_adapter_with_a_chat_format_that_its_base_lacks_is_refused(home: Path) -> None:
    store = Store(home)
    with Build(store, kind="model", name="a/chat", parents={}, config={"n": "chat"}, version=1) as build:
        shutil.copytree(
            store.open("a/sft").path, build.path, dirs_exist_ok=True, ignore=lambda *_: [FILE_NAME]
        )
        path = build.path / "tokenizer.json"
        content = json.loads(path.read_text())
        content["added_tokens"].append({**content["added_tokens"][-1], "id": 300, "content": "<|turn|>"})
        path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"chat format has tokens that a/pretrain lacks(.|\n)*serve a/chat"):
        load(home, "a/pretrain", adapters=["a/chat"])


@pytest.mark.parametrize(
    ("base", "text", "words", "error"),
    [
        ("b/pretrain", "a/sft", "trained on .*, and b/pretrain is another model", ConfigError),
        ("a/pretrain", "b/pretrain", "b/pretrain has no adapter", ConfigError),
        ("a/pretrain", "x=nowhere", "no artifact 'nowhere'", StoreError),
        ("a/sft", "a/sft", "the name must be unique", ConfigError),
        ("a/pretrain", "=a/sft", "the name must be unique", ConfigError),
        ("a/pretrain", "name=", "the name must be unique", ConfigError),
    ],
)
def test_wrong_adapters_are_refused(home: Path, base: str, text: str, words: str, error: Any) -> None:
    with pytest.raises(error, match=words):
        load(home, base, adapters=[text])


def test_chat_template_of_a_file_replaces_the_models(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(TEMPLATE)
    (model,), engine = load(home, "a/pretrain", chat_template=path)
    messages = [{"role": "user", "content": "def "}]
    with running(AppState(ServeConfig(port=0), [model], engine)) as one:
        ids = one.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert model.tokenizer.decode(ids).decode() == "[user] def \n[assistant] "
        assert one.get("/v1/models").json()["data"][0]["whorl"] == {"chat": True, "template": "model"}
    path.write_text("{% for %}")
    with pytest.raises(DataError, match=r"t\.jinja: the chat template cannot be compiled"):
        load(home, "a/pretrain", chat_template=path)
    with pytest.raises(DataError, match="nowhere"):
        load(home, "a/pretrain", chat_template=tmp_path / "nowhere")


def test_options_for_one_model_are_refused_with_two(home: Path) -> None:
    store = ("--store", str(home), "--port", "0")
    for words, message in (
        (("--name", "x"), "--name is given with 2 models"),
        (("--prefill", "1"), "--prefill is given with 2 models"),
        ((), "two models have the name 'a/pretrain'"),
    ):
        second = "b/pretrain" if words else "a/pretrain"
        done = CliRunner().invoke(build_app(), ["serve", "a/pretrain", second, *words, *store])
        assert done.exit_code == 2 and message in done.stderr
    with pytest.raises(ConfigError, match="increase --kv-cache-memory"):
        load(home, "a/pretrain", "b/pretrain", cache=1 << 10)
