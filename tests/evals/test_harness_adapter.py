"""The adapter for lm-evaluation-harness: requests, answers, arguments; with a stand-in for the harness's modules."""

from __future__ import annotations

import importlib.machinery
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench.evals.harness._adapter import HarnessAdapter, adapt, main, register
from tests.support.evals.backend import FakeBackend
from tests.support.evals.hf_folders import make_folder, sentences

from whorl.errors import ConfigError, DataError
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)


@dataclass
class Instance:
    """A request of the harness."""

    args: tuple[Any, ...]


def answer(request: Request) -> Response:
    if isinstance(request, GenerateRequest):
        return Completion(f"{request.prompt} {request.max_tokens}")
    if isinstance(request, TextRequest):
        return Score((1, 2), (-1.0, -float(len(request.text))), False)
    return Score((1, 2), (-0.5, -1.0), request.continuation == "b")


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules that the adapter uses; returns the registry of models."""

    class LM:
        def __init__(self) -> None:
            self.rank = 0

    registry: dict[str, Any] = {}
    contents: dict[str, dict[str, Any]] = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"LM": LM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: registry.setdefault(name, cls)},
        "lm_eval.utils": {
            "simple_parse_args_string": lambda text: dict(part.split("=") for part in text.split(","))
        },
    }
    for name, values in contents.items():
        module = ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return registry


def test_requests_are_those_of_the_back_end(harness: dict[str, Any]) -> None:
    backend = FakeBackend(answer)
    lm = adapt(backend)
    assert lm.rank == 0 and lm.loglikelihood([Instance(("a", "b")), Instance(("a", "c"))]) == [
        (-1.5, True),
        (-1.5, False),
    ]
    assert lm.loglikelihood_rolling([Instance(("abc",))]) == [-4.0]
    settings = {"until": "\n", "max_gen_toks": 7, "do_sample": False, "temperature": 0.5}
    sampled = {"do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_tokens": 3}
    assert lm.generate_until([Instance(("q", settings)), Instance(("r", sampled)), Instance(("s", {}))]) == [
        "q 7", "r 3", "s 256",
    ]  # fmt: skip
    assert backend.sent == [
        ScoreRequest("a", "b"), ScoreRequest("a", "c"), TextRequest("abc", 100, 100, True),
        GenerateRequest("q", 7, ("\n",)), GenerateRequest("r", 3, (), 0.5, 0.9), GenerateRequest("s", 256),
    ]  # fmt: skip


def test_missing_response_and_unknown_settings_are_errors(harness: dict[str, Any]) -> None:
    lm = adapt(FakeBackend(lambda _: Missing("timed out")))
    with pytest.raises(DataError, match="request 0 has no response: timed out"):
        lm.loglikelihood([Instance(("a", "b"))])
    with pytest.raises(ConfigError, match="setting 'top_k' has no counterpart"):
        lm.generate_until([Instance(("a", {"top_k": 3}))])
    with pytest.raises(ConfigError, match="local-chat-completions"):
        lm.apply_chat_template([{"role": "user", "content": "hi"}])


def test_registered_model_opens_a_folder(harness: dict[str, Any], tmp_path: Path) -> None:
    register()
    made = harness["whorl"]
    assert issubclass(made, HarnessAdapter)
    folder = make_folder(tmp_path, "gpt2")
    lm = made.create_from_arg_string(
        f"pretrained={folder},dtype=float32", {"batch_size": 1, "max_batch_size": None, "device": "cpu"}
    )
    texts, found = sentences(3), {}
    lm.backend.respond([ScoreRequest(texts[0], f" {texts[1]}")], found.__setitem__)
    assert isinstance(lm.backend, EngineBackend) and lm.backend.engine.config.max_num_seqs == 64
    assert lm.loglikelihood([Instance((texts[0], f" {texts[1]}"))])[0][0] == pytest.approx(found[0].total)
    four = made.create_from_arg_obj({"pretrained": str(folder)}, {"batch_size": "4"})
    assert four.backend.engine.config.max_num_seqs == 4
    with pytest.raises(ConfigError, match="names no model"):
        made.create_from_arg_obj({})


def test_without_the_harness_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(SystemExit, match="needs the package lm_eval"):  # a message, no traceback
        main()
    with pytest.raises(ConfigError, match="needs the package lm_eval"):
        adapt(FakeBackend(answer))
