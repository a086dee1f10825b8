"""Layer statistics: correct, equal on any number of replicas, without effect on training."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.train.pretraining import assert_equal, train, train_notes, weights
from tests.support.train.tiny import Notes, job

from whorl.models import Transformer
from whorl.nn.cpu.library import native_library
from whorl.parallel.process_group import ProcessGroup
from whorl.train.lm import build
from whorl.train.lm.kernels import Kernels
from whorl.train.metrics import layer_stats as figures
from whorl.train.metrics.layer_stats import layer_group
from whorl.train.metrics.validation import Validator
from whorl.train.optim.optimizers import SparseAdagrad


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MIN_INTERVAL", 4)


def looks(notes: Notes) -> list[dict[str, float]]:
    return [m for m in notes.steps if any(name.startswith("weight_norm/") for name in m)]


def test_layer_group_from_parameter_name() -> None:
    assert layer_group("embedding") == "embedding"
    assert layer_group("memory.tables.0") == "memory"
    assert layer_group("blocks.3.mixer.qkv.weight") == "blocks.3.mixer"
    for norm in ("attention_norm", "mlp_norm"):
        assert layer_group(f"blocks.3.{norm}.weight") == "blocks.3.norms"


@pytest.mark.parametrize("native", [False, True])
def test_layer_stats_do_not_change_training(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native: bool
) -> None:
    models, notes, tables = [], [Notes(), Notes()], list[str]()
    if native and native_library("update") is None:
        pytest.skip("there is no C++ compiler here")
    monkeypatch.setattr(build, "choose_kernels", lambda *_: Kernels(native_update=native))
    step_native = SparseAdagrad.step_native

    def spied(self: SparseAdagrad, name: str, *rest: Any) -> None:
        tables.append(name)
        step_native(self, name, *rest)

    monkeypatch.setattr(SparseAdagrad, "step_native", spied)
    for every, seen in zip((1, 1000), notes, strict=True):
        monkeypatch.setattr(figures, "MIN_INTERVAL", every)
        models.append(train(job(tokens), tmp_path / str(every), seen))
    often, rarely = notes
    assert len(looks(often)) == 6  # every second step, Muon's interval
    assert len(looks(rarely)) == 1  # the last one
    assert [m["loss"] for m in often.steps] == [m["loss"] for m in rarely.steps]
    assert_equal(*models)
    steps = sum(len(seen.steps) for seen in notes)
    assert len(tables) == (2 * steps if native else 0)  # two tables, in measured steps too


def test_layer_stats_norms_match_weights_and_gradient(tokens: Path, tmp_path: Path, often: None) -> None:
    notes, squares = Notes(), defaultdict[str, float](float)
    for name, p in train(job(tokens), tmp_path, notes).named_parameters():
        squares[layer_group(name)] += float(p.detach().double().square().sum())
    assert [n for n, m in enumerate(notes.steps, start=1) if m in looks(notes)] == [4, 8, 12]
    last = notes.steps[-1]
    for group, square in squares.items():
        assert last[f"weight_norm/{group}"] == pytest.approx(square**0.5, rel=1e-5), group
        assert 0 < last[f"update_ratio/{group}"] < 1, group
        assert last[f"grad_norm/{group}"] > 0, group
    dense = sum(last[f"grad_norm/{g}"] ** 2 for g in squares if g != "memory")
    assert dense**0.5 == pytest.approx(last["grad_norm"], rel=1e-5)
    assert 0 < last["stats_overhead"] < 1


def test_layer_stats_update_ratio_matches_separate_runs(tokens: Path, tmp_path: Path, often: None) -> None:
    notes = Notes()
    start = weights(train(job(tokens), tmp_path / "a", stop_after=6))
    end = weights(train(job(tokens), tmp_path / "b", notes, stop_after=8))
    names = [n for n in end if n.startswith("blocks.0.mlp.")]
    way = sum(float((end[n] - start[n]).double().square().sum()) for n in names) ** 0.5
    size = sum(float(start[n].double().square().sum()) for n in names) ** 0.5
    assert notes.steps[-1]["update_ratio/blocks.0.mlp"] == pytest.approx(way / size / 2, rel=1e-4)
    assert notes.steps[-1]["update_ratio/memory"] > 0


def test_layer_stats_equal_on_two_replicas(tokens: Path, tmp_path: Path) -> None:
    one, two = (train_notes(job(tokens, steps=6, replicas=n), tmp_path / str(n)).steps[-1] for n in (1, 2))
    # a single micro-batch has no variance estimate
    assert set(one) == {n for n in two if not n.startswith("noise_scale/")}
    names = [n for n in one if n.partition("/")[0] in ("grad_norm", "weight_norm", "update_ratio")]
    assert {n: two[n] for n in names} == pytest.approx({n: one[n] for n in names}, rel=2e-2)


def test_layer_stats_continue_after_resume(tokens: Path, tmp_path: Path, often: None) -> None:
    wanted = job(tokens, micro_batch_size=2)
    whole = looks(train_notes(wanted, tmp_path / "whole"))
    train(wanted, tmp_path / "cut", stop_after=5, checkpoint_seconds=0.0)
    rest = looks(train_notes(wanted, tmp_path / "cut"))
    assert len(whole) == 3 and len(rest) == 2 and "noise_scale/tokens" in whole[-1]
    a, b = (
        [{k: v for k, v in m.items() if re.search("(norm|ratio|activations|noise_scale)/", k)} for m in seen]
        for seen in (whole[1:], rest)
    )
    assert a == b


def test_layer_stats_activations_match_forward(tokens: Path, tmp_path: Path) -> None:
    notes = Notes()
    model = train(job(tokens, steps=4), tmp_path, notes)
    last = notes.steps[-1]
    row = Validator(job(tokens), ProcessGroup()).fixed_ids()[:1, :32]
    with torch.no_grad():
        x, where = model.prepare(row)
        x = model.embedding_norm(x)
        for number, block in enumerate(model.blocks):
            mixed = x + block.mixer(block.mixer_norm(x), where)
            inside = torch.relu(block.mlp.up(block.mlp_norm(mixed)))
            x = block(x, where, None, None, None, [])
            rms, found = float(x.square().mean().sqrt()), f"activations/{number}"
            outliers, zeros = (x.abs() > 6 * rms).float().mean(), (inside == 0).float().mean()
            assert last[f"{found}/rms"] == pytest.approx(rms, rel=1e-4)
            assert last[f"{found}/outliers"] == pytest.approx(float(outliers), abs=1e-6)
            assert last[f"{found}/zeros"] == pytest.approx(float(zeros), abs=1e-3)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layer_stats_learning_rates_and_flops_every_step(tokens: Path, tmp_path: Path) -> None:
    flops = Transformer(job(tokens).model).flops_per_token(32)
    for m in train_notes(job(tokens, steps=4), tmp_path).steps:
        assert m["learning_rate/embedding"] / m["learning_rate"] == pytest.approx(0.006 / 0.02)
        assert m["learning_rate/ngram"] / m["learning_rate"] == pytest.approx(0.05 / 0.02)
        assert m["flops_per_second"] == pytest.approx(m["tokens_per_second"] * flops)
