"""Layer statistics: correct, equal on any number of replicas, without effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.train.tiny import Notes, job

from whorl.models import Decoder
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain
from whorl.train.metrics import layer_stats as figures
from whorl.train.metrics.layer_stats import layer_group


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MIN_INTERVAL", 4)


def train(wanted: Job, scratch: Path, **more: Any) -> tuple[Decoder, Notes]:
    notes = Notes()
    return pretrain(wanted, scratch, notes, **more), notes  # type: ignore[return-value]


def looks(notes: Notes) -> list[dict[str, float]]:
    return [m for m in notes.steps if any(name.startswith("weight_norm/") for name in m)]


def test_layer_group_from_parameter_name() -> None:
    assert layer_group("embedding") == "embedding"
    assert layer_group("memory.tables.0") == "memory"
    assert layer_group("blocks.3.attention.qkv.weight") == "blocks.3.attention"
    assert (
        layer_group("blocks.3.attention_norm.weight")
        == layer_group("blocks.3.mlp_norm.weight")
        == "blocks.3.norms"
    )


def test_layer_stats_do_not_change_training(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for every in (1, 1000):
        monkeypatch.setattr(figures, "MIN_INTERVAL", every)
        model, notes = train(job(tokens), tmp_path / str(every))
        found[every] = dict(model.named_parameters()), [m["loss"] for m in notes.steps], len(looks(notes))
    often, rarely = found[1], found[1000]
    assert often[2] == 6 and rarely[2] == 1  # every second step, Muon's interval, and the last one
    assert often[1] == rarely[1]
    assert all(torch.equal(p, rarely[0][n]) for n, p in often[0].items())


def test_layer_stats_norms_match_weights_and_gradient(tokens: Path, tmp_path: Path, often: None) -> None:
    model, notes = train(job(tokens), tmp_path)
    assert [n for n, m in enumerate(notes.steps, start=1) if m in looks(notes)] == [4, 8, 12]
    last = notes.steps[-1]
    squares: dict[str, float] = {}
    for name, p in model.named_parameters():
        squares[layer_group(name)] = squares.get(layer_group(name), 0.0) + float(
            p.detach().double().square().sum()
        )
    for group, square in squares.items():
        assert last[f"weight_norm/{group}"] == pytest.approx(square**0.5, rel=1e-5), group
        assert 0 < last[f"update_ratio/{group}"] < 1, group
        assert last[f"grad_norm/{group}"] > 0, group
    dense = sum(last[f"grad_norm/{g}"] ** 2 for g in squares if g != "memory")
    assert dense**0.5 == pytest.approx(last["grad_norm"], rel=1e-5)
    assert 0 < last["stats_overhead"] < 1


def test_layer_stats_update_ratio_matches_separate_runs(tokens: Path, tmp_path: Path, often: None) -> None:
    wanted = job(tokens)
    before, _ = train(wanted, tmp_path / "a", stop_after=6)
    start = {n: p.detach().clone() for n, p in before.named_parameters()}
    after, notes = train(wanted, tmp_path / "b", stop_after=8)
    end = dict(after.named_parameters())
    names = [n for n in end if n.startswith("blocks.0.mlp.")]
    way = sum(float((end[n].detach() - start[n]).double().square().sum()) for n in names) ** 0.5
    size = sum(float(start[n].double().square().sum()) for n in names) ** 0.5
    assert notes.steps[-1]["update_ratio/blocks.0.mlp"] == pytest.approx(way / size / 2, rel=1e-4)
    names = [n for n in end if n.startswith("memory.")]
    assert notes.steps[-1]["update_ratio/memory"] > 0


def test_layer_stats_equal_on_two_replicas(tokens: Path, tmp_path: Path) -> None:
    one = train(job(tokens, steps=6), tmp_path / "one")[1].steps[-1]
    two = train(job(tokens, steps=6, replicas=2), tmp_path / "two")[1].steps[-1]
    names = [n for n in one if n.partition("/")[0] in ("grad_norm", "weight_norm", "update_ratio")]
    assert set(names) == {
        n for n in two if n.partition("/")[0] in ("grad_norm", "weight_norm", "update_ratio")
    }
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=2e-2), name
    assert set(one) == {
        n for n in two if not n.startswith("noise_scale/")
    }  # a single micro-batch has no variance estimate


def test_layer_stats_continue_after_resume(tokens: Path, tmp_path: Path, often: None) -> None:
    whole = looks(train(job(tokens), tmp_path / "whole")[1])
    train(job(tokens), tmp_path / "cut", stop_after=5, checkpoint_seconds=0.0)
    rest = looks(train(job(tokens), tmp_path / "cut")[1])
    assert len(whole) == 3 and len(rest) == 2
    for a, b in zip(whole[1:], rest, strict=True):
        assert {k: v for k, v in a.items() if "norm/" in k or "ratio/" in k or "activations/" in k} == {
            k: v for k, v in b.items() if "norm/" in k or "ratio/" in k or "activations/" in k
        }


def test_layer_stats_activations_match_forward(tokens: Path, tmp_path: Path) -> None:
    model, notes = train(job(tokens, steps=4), tmp_path)
    last = notes.steps[-1]
    from whorl.parallel.process_group import ProcessGroup
    from whorl.train.metrics.validation import Validator

    row = Validator(job(tokens), ProcessGroup()).fixed_ids()[:1, :32]
    with torch.no_grad():
        x, where = model.prepare(row)
        x = model.embedding_norm(x)
        for number, block in enumerate(model.blocks):
            inside = torch.relu(
                block.mlp.up(block.mlp_norm(x + block.attention(block.attention_norm(x), where)))
            )
            x = block(x, where, None, None)
            rms = float(x.square().mean().sqrt())
            assert last[f"activations/{number}/rms"] == pytest.approx(rms, rel=1e-4)
            assert last[f"activations/{number}/outliers"] == pytest.approx(
                float((x.abs() > 6 * rms).float().mean()), abs=1e-6
            )
            assert last[f"activations/{number}/zeros"] == pytest.approx(
                float((inside == 0).float().mean()), abs=1e-3
            )
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layer_stats_learning_rates_and_flops_every_step(tokens: Path, tmp_path: Path) -> None:
    _, notes = train(job(tokens, steps=4), tmp_path)
    model = job(tokens).model
    for m in notes.steps:
        assert m["learning_rate/embedding"] / m["learning_rate"] == pytest.approx(0.006 / 0.02)
        assert m["learning_rate/ngram"] / m["learning_rate"] == pytest.approx(0.05 / 0.02)
        flops = Decoder(model).flops_per_token(32)  # type: ignore[arg-type]
        assert m["flops_per_second"] == pytest.approx(m["tokens_per_second"] * flops)
