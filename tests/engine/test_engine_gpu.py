"""The engine on a GPU: the tokens and log-probabilities of a CPU, for each family of models."""

from __future__ import annotations

import pytest
import torch
from tests.support.engine.parity import FAMILIES, assert_same, config, prompt_requests, run

from whorl.engine.engine import Engine
from whorl.engine.model.cuda_graphs import GraphRunner

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

RECORDED = (
    "decoder",
    "decoder without memory",
    "plain",
    "gpt",
    "gemma",
    "capped",
    "alibi",
    "sparse",
    "post",
    "shared keys",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_matches_cpu(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled, in fp32; prompts share steps, and the longest takes several."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of RNN, GRU and LSTM
    for temperature in (0.0, 1.0):
        engines = [Engine(FAMILIES[family]().to(device), config()) for device in ("cpu", "cuda")]
        on_cpu, on_gpu = (run(engine, prompt_requests(6, temperature=temperature)) for engine in engines)
        for name, tokens in on_cpu.items():
            assert_same(on_gpu[name], tokens)
        runner = engines[1].runner
        assert isinstance(runner, GraphRunner)
        assert bool(runner._steps) == runner.replays
        assert runner.replays or family not in RECORDED, "decoding steps were not recorded"
