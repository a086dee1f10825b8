"""Decoding steps of fixed sizes: padded rows and pages change nothing. Graphs need a GPU (`test_engine_gpu.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.engine.parity import FAMILIES, assert_same, config, decoder, prompt_requests, request, run

from whorl.engine.cpu import runner as native_runner
from whorl.engine.engine import Engine
from whorl.engine.model import cuda_graphs
from whorl.engine.model.cuda_graphs import DecodeStep, GraphRunner, padded_size
from whorl.engine.model.runner import ModelRunner


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Run decoding steps by `GraphRunner` on the CPU, without graphs; returns the sizes of the steps that ran."""
    ran: list[tuple[int, int]] = []

    class Counting(DecodeStep):
        def run(self, batch: Any) -> torch.Tensor:
            ran.append((self.rows, self.pages))
            return super().run(batch)

    monkeypatch.setattr(native_runner, "choose_once", lambda *_: "torch")
    monkeypatch.setattr(native_runner, "ModelRunner", GraphRunner)
    monkeypatch.setattr(cuda_graphs, "DecodeStep", Counting)
    return ran


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_steps_give_the_same_tokens(
    family: str, padded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of several lengths that come and go, with windows, latents, shared caches and smeared keys."""
    model = FAMILIES[family]()
    fixed = Engine(model, config(max_num_seqs=3))
    assert isinstance(fixed.runner, GraphRunner)
    monkeypatch.setattr(native_runner, "ModelRunner", ModelRunner)
    plain = Engine(model, config(max_num_seqs=3))
    for temperature in (0.0, 1.0):
        expected = run(plain, prompt_requests(7, temperature=temperature))
        for name, tokens in run(fixed, prompt_requests(7, temperature=temperature)).items():
            assert_same(tokens, expected[name])
    assert bool(padded) == (not fixed.runner.has_recurrent_layers and bool(fixed.runner.windows))
    assert all(rows in (1, 2, 4) for rows, _ in padded)


def test_steps_are_kept_by_size(padded: list[tuple[int, int]]) -> None:
    engine = Engine(decoder(), config(max_model_len=30))
    run(engine, [request(str(n), range(1, 3 + n), max_tokens=20) for n in range(3)])
    assert isinstance(engine.runner, GraphRunner)
    assert set(engine.runner._steps) == set(padded)
    assert {pages for _, pages in padded} <= {1, 2, 4, 8} and len(padded) > len(set(padded))


def test_new_weights_are_read(padded: list[tuple[int, int]]) -> None:
    """Weights change in place, so a recorded step reads them."""
    model, other = decoder(), decoder(n_layers=2)
    engine = Engine(model, config())
    before = run(engine, [request()])["one"]
    with torch.no_grad():
        changed = {name: p * 0.5 for name, p in other.named_parameters()}
    engine.update_weights(changed, version=2)
    after = run(engine, [request()])["one"]
    other.load_state_dict(changed, strict=False)
    assert_same(after, run(Engine(other, config()), [request()])["one"])
    assert [t.raw_log_prob for t in before] != [t.raw_log_prob for t in after]


def test_a_step_that_cannot_be_recorded_runs_as_before(
    padded: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("called a synchronizing operation")

    expected = run(Engine(decoder(), config()), [request()])["one"]
    monkeypatch.setattr(cuda_graphs, "DecodeStep", fail)
    engine = Engine(decoder(), config())
    assert_same(run(engine, [request()])["one"], expected)
    assert isinstance(engine.runner, GraphRunner) and not engine.runner.replays


@pytest.mark.parametrize(("n", "size"), [(1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_padded_size(n: int, size: int) -> None:
    assert padded_size(n) == size
