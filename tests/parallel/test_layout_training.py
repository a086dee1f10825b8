"""Training under a layout: norm, Muon, AdamW, tables and experts; faults are caught; another layout continues a run."""

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from bench.parallel.equal import BAR, FAULTS, PRELOAD, compare
from tests.support.train import tiny

from whorl.models.transformer_config import whorl_decoder
from whorl.parallel import expert_dispatch
from whorl.parallel.distributed import drive
from whorl.parallel.expert_dispatch import place_experts
from whorl.parallel.layout import Layout
from whorl.parallel.ranks import run_ranks
from whorl.train.lm.build import build_model
from whorl.train.lm.laid_out import lay_out
from whorl.train.lm.pretrain import pretrain

STEPS = 1


def test_two_ranks_train_as_one_rank_and_faults_are_caught():
    layouts = [
        ("ours", "tp=2", ""),
        ("ours", "fsdp=2", ""),
        ("tied", "pp=2", ""),
        ("experts", "dp=2,ep=2", ""),
        ("experts", "fsdp=2", ""),
    ]
    planted = [(*FAULTS[name][:2], name) for name in FAULTS]
    found = compare([*layouts, *planted], STEPS)
    for case, (far, control) in zip(layouts, found[: len(layouts)], strict=True):
        assert far < 2 * BAR * control, case  # of one step the control is small by chance
    for case, (far, control) in zip(planted, found[len(layouts) :], strict=True):
        assert far > 2 * BAR * control, case


SHAPE = whorl_decoder(300, 64, 2, 2, 2, head_dim=32, ngram_buckets=256, mlp_hidden=128)
EXPERTS = whorl_decoder(
    300, 32, 2, 2, 2, head_dim=16, mlp_hidden=64, ngram_orders=(),
    experts={"n_experts": 4, "top_k": 2, "hidden": 16},
)  # fmt: skip


def train(folder, layout, scratch, stop_after, shape=SHAPE):
    replicas = 1 if layout is None else Layout.parse(layout).data_ranks
    job = tiny.job(folder / "tokens", steps=4, model=shape, layout=layout, replicas=replicas)
    notes = tiny.Notes()
    model = pretrain(job, folder / scratch, notes, stop_after=stop_after, checkpoint_seconds=0.0)
    return {name: t.detach().numpy().copy() for name, t in model.state_dict().items()}, len(notes.steps)


def train_in_turn(folder):
    return train(folder, "tp=2", "ranks", 2)[1], *train(folder, "fsdp=2", "ranks", None)


def train_experts_in_turn(folder):
    placed = []

    def place(loads, ranks):
        placed.append(place_experts(loads, ranks))
        return placed[-1]

    with mock.patch.object(expert_dispatch, "place_experts", place):
        steps = train(folder, "dp=2,ep=2", "experts", 2, EXPERTS)[1]
        found, after = train(folder, "dp=2,ep=2", "experts", None, EXPERTS)
    return steps, found, after, placed


def test_another_layout_continues_a_run_as_one_rank_would(tmp_path: Path):
    tiny.make_tokens(tmp_path / "tokens")
    (before, found, after), _ = run_ranks(2, drive, train_in_turn, tmp_path, preload=PRELOAD)
    assert (before, after) == (2, 2)
    for name, expected in train(tmp_path, None, "one", None)[0].items():
        np.testing.assert_allclose(found[name], expected, atol=2e-6, err_msg=name)
    traced = json.loads((tmp_path / "ranks" / "parallel.json").read_text())  # of the fourth step
    assert [rank["place"] for rank in traced["ranks"]] == ["fsdp 0", "fsdp 1"]
    assert all(len(rank["timeline"]) == 24 for rank in traced["ranks"]) and traced["seconds"] > 0
    # Two blocks twice, the rest once; ids and gradients of two tables.
    assert traced["totals"]["fsdp all_gather"][0] == 5 + 4


def test_a_continued_run_places_experts_by_the_loads_of_its_last_step(tmp_path: Path):
    tiny.make_tokens(tmp_path / "tokens")
    (before, found, after, placed), _ = run_ranks(2, drive, train_experts_in_turn, tmp_path, preload=PRELOAD)
    assert (before, after) == (2, 2)
    assert placed[0] == [0, 0, 1, 1] and any(owners != [0, 0, 1, 1] for owners in placed)
    for name, expected in train(tmp_path, None, "one expert", None, EXPERTS)[0].items():
        np.testing.assert_allclose(found[name], expected, atol=1e-4, err_msg=name)


def test_dropout_of_experts_is_refused(tmp_path: Path):
    experts = {"n_experts": 4, "top_k": 2, "hidden": 16, "token_dropout": 0.1}
    shape = whorl_decoder(300, 32, 2, 2, 2, head_dim=16, mlp_hidden=64, ngram_orders=(), experts=experts)
    job = tiny.job(tmp_path, model=shape, layout="dp=1")
    with pytest.raises(Exception, match="excludes experts with dropout"):
        lay_out(build_model(job), job, None)


def test_a_layout_without_ranks_names_the_command(tmp_path: Path):
    tiny.make_tokens(tmp_path / "tokens")
    with pytest.raises(Exception, match="whorl launch RECIPE --on torchrun --ranks 2 --layout tp=2"):
        train(tmp_path, "tp=2", "ranks", None)
