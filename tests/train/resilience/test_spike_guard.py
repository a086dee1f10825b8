"""The spike guard: decisions, rollbacks and limits, exact on all replicas and after a resume."""

from __future__ import annotations

import copy
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.train.learners import adamw_learner, networks, part, run
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, raw_text, train, train_notes
from tests.support.train.spike_guards import make_guard, poisoned, step_metrics
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.align.config import StageConfig
from whorl.corpus.documents import document_id
from whorl.errors import DataError
from whorl.tokens.loader import open_batches
from whorl.tokens.shards import TokenSet
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.job import Job
from whorl.train.learner.update import DivergedError
from whorl.train.lm import pretrain as module
from whorl.train.resilience.provenance import documents_in_batch
from whorl.train.resilience.spike_guard import SpikeGuard

BAD = 17  # only this document contains the letter x
BAD_ID = document_id("test", f"{BAD}.txt", 0)


def ripple(step: int) -> dict[str, float]:
    return step_metrics(2 + 0.1 * math.sin(step), 0.5 + 0.1 * math.cos(3 * step))


def test_spike_guard_rejects_spikes_not_ripples() -> None:
    guard = make_guard()
    assert all(guard.accept_step(ripple(step)) for step in range(40))
    assert guard.accept_step(step_metrics(2.5, 0.9)), "a hard batch is no spike"
    for bad, words in ((step_metrics(5.0), "loss is 5"), (step_metrics(norm=20.0), "gradient norm is 20")):
        assert not guard.accept_step(bad) and words in guard.events[-1]["message"]
    assert [e["step"] for e in guard.events] == [42, 43] and guard.skipped == 2
    off = [*map(ripple, range(40)), step_metrics(1e9, 1e9)]
    assert all(make_guard(threshold=0.0).accept_step(f) for f in off)


def test_stage_guard_keeps_outliers_unless_a_threshold_is_set() -> None:
    """Another setting of the guard does not turn the skipping of outliers on."""
    config = StageConfig.model_validate(
        {"train": {"spike_guard": {"window": 64, "patience": 4}}}
    ).train.spike_guard
    guard = SpikeGuard(config, uniform_loss=None, steps=1000)
    assert all(guard.accept_step(f) for f in [*map(ripple, range(80)), step_metrics(1e9, 1e9)])
    assert not guard.accept_step(step_metrics(math.nan))


def test_spike_guard_detects_divergence() -> None:
    guard = make_guard(threshold=0.0)
    for nll in (5.7, 6.0, 8.0, 9.0, 5.6, 5.9, 5.0, 5.7):  # above, then recovered
        guard.accept_step(step_metrics(nll))
    assert guard.diverged_steps == 0
    for nll in (7.0, *[5.703] * 63):  # above, then constant at the uniform loss
        assert not guard.needs_rollback
        guard.accept_step(step_metrics(nll))
    assert guard.needs_rollback
    with pytest.raises(DivergedError, match=r"64 steps ago the loss rose above 5\.70 nats"):
        guard.roll_back()
    slow = make_guard(threshold=0.0)  # begins high
    assert all(slow.accept_step(step_metrics(9.0 - step / 100)) for step in range(200))
    assert not slow.diverged_steps


def test_spike_guard_median_is_robust_to_earlier_spikes() -> None:
    guard = make_guard(patience=100)
    for step in range(32):
        guard.accept_step(ripple(step))
    accepted = [guard.accept_step(step_metrics(50.0 if step % 4 == 0 else 2.0)) for step in range(32)]
    assert accepted == [step % 4 != 0 for step in range(32)]
    kept = [guard.accept_step(step_metrics(6.0)) for _ in range(40)]
    assert not kept[0] and kept[-1]


@pytest.mark.parametrize("bad", [{"loss": math.nan}, {"loss": math.inf}, {"norm": math.nan}, {"count": 0.0}])
def test_spike_guard_rejects_nonfinite_and_empty(bad: dict[str, float]) -> None:
    guard = make_guard()
    assert not guard.accept_step(step_metrics(**bad)) and guard.accept_step(step_metrics())
    json.dumps(guard.state, allow_nan=False)


def test_spike_guard_state_restores_decisions() -> None:
    rng = np.random.default_rng(0)
    seen = [step_metrics(*rng.lognormal(0, 0.4, 2) * rng.choice([1, 1, 1, 9], 2)) for _ in range(300)]
    whole = make_guard(patience=1000)
    answers = [whole.accept_step(f) for f in seen]
    parts, again = make_guard(patience=1000), []
    for number, one in enumerate(seen):
        parts = make_guard(json.loads(json.dumps(parts.state)), first=number, patience=1000)
        again.append(parts.accept_step(one))
    assert answers == again and 3 < answers.count(False) < 100 and whole.state == parts.state


def test_spike_guard_limits_raise_with_remedy() -> None:
    guard = make_guard(patience=2, max_rollbacks=1)
    guard.snapshot_step = 7
    for _ in range(2):
        guard.accept_step(step_metrics(math.nan))
    assert guard.needs_rollback and guard.roll_back() == 7 and not guard.needs_rollback
    for _ in range(2):
        guard.accept_step(step_metrics(math.nan))
    with pytest.raises(DivergedError, match=r"2 bad steps in a row(.|\n)*optim\.lr_muon"):
        guard.roll_back()
    guard = make_guard(patience=2)
    for step in range(9):
        guard.accept_step(step_metrics(math.nan))
        guard.accept_step(ripple(step))
    with pytest.raises(DivergedError, match=r"9 of 18 batches were skipped(.|\n)*at most 5%"):
        guard.check_skip_limit()
    guard = make_guard()
    for _ in range(3):
        guard.accept_step(step_metrics(count=0.0))
    with pytest.raises(DataError, match="3 batches in a row have no target token"):
        guard.roll_back()


def test_nan_without_guard_raises_before_any_update() -> None:
    nets, bad = networks(), part()
    before = copy.deepcopy(nets)
    bad["x"][3, 1] = math.nan  # type: ignore[index]
    with pytest.raises(DivergedError, match=r"the loss is nan(.|\n)*check the data or the rewards for NaN"):
        run(adamw_learner(nets), [bad])
    assert_equal(nets, before)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokens(tmp_path_factory.mktemp("tokens"), alphabet="abcd", replaced={BAD: "x" * 400})


def batches_with_x(tokens: Path, wanted: Job) -> list[int]:
    """Numbers of the batches that contain the letter x."""
    with open_batches(tokens, "train", seq_len=32, batch_size=8, serial=True) as batches:
        return [n for n in range(wanted.steps) if (next(batches).data.tokens == ord("x")).any()]


def test_nan_batches_skipped_and_documents_listed(tokens: Path, tmp_path: Path) -> None:
    notes, messages = Notes(), list[str]()
    wanted = poisoned(tokens, tmp_path)
    assert Tokenizer.load(tokens).encode_document("x")[1] == ord("x")
    model = train(wanted, tmp_path, notes, log=messages.append)
    bad = batches_with_x(tokens, wanted)
    assert len(notes.steps) + len(notes.events) == 48, "a skipped step is not in the loss curve"
    assert 2 < len(bad) < 20 and [e["step"] for e in notes.events] == [n + 1 for n in bad]
    for event in notes.events:
        assert event["kind"] == "nonfinite" and event["loss"] is None and event["documents"]
        assert BAD_ID in [d["id"] for d in event["documents"]], "the bad document"
        assert f"{BAD}.txt ({BAD_ID})" in next(s for s in messages if s.startswith(f"step {event['step']}:"))
    assert all(p.isfinite().all() for n, p in model.named_parameters() if n != "embedding")
    assert all(math.isfinite(s["nll"]) for s in notes.steps) and notes.evaluations[-1]["held_out_nll"] < 5


def test_documents_in_batch_are_exact(tokens: Path) -> None:
    wanted, train_split = job(tokens), TokenSet(tokens).split("train")
    texts = {
        document_id("test", f"{n}.txt", 0): str(ids.tolist())
        for n, ids in enumerate(train_split.iter_documents(), start=5)
    }
    with open_batches(tokens, "train", seq_len=32, batch_size=8, serial=True) as batches:
        for number in range(4):
            data = next(batches).data
            found = documents_in_batch(wanted, number, None)
            named = {d["id"] for d in found["documents"]}
            assert found["n_documents"] == len(named) <= 20
            met = set()
            for row, segments in zip(data.tokens, data.segment_ids, strict=True):
                for segment in range(1, segments.max() + 1):
                    stretch = str(row[segments == segment].tolist())[1:-1]
                    inside = {i for i in named if stretch in texts[i]}
                    assert inside, "tokens of a document that is not listed"
                    met |= inside
            assert met == named


WATCHES = [{"patience": 1000}, {"patience": 1, "max_rollbacks": 1000, "snapshot_every": 4}]


@pytest.mark.parametrize("watch", WATCHES)
def test_run_with_events_resumes_bit_exact(tokens: Path, tmp_path: Path, watch: dict[str, object]) -> None:
    change = {"spike_guard": {"max_skipped": 1.0, **watch}}
    whole = Notes()
    undisturbed = train(poisoned(tokens, tmp_path / "a", **change), tmp_path / "a", whole)
    kinds = [e["kind"] for e in whole.events]
    assert kinds.count("nonfinite") > 2 and ("rollback" in kinds) == (watch["patience"] == 1)
    wanted, notes = poisoned(tokens, tmp_path / "b", **change), Notes()
    for stop, seconds in ((5, 0.0), (21, 1e9), (20, 0.0), (42, 1e9), (31, 0.0), (47, 1e9)):
        # An interval of 1e9 writes no checkpoint, as if killed; its other files refer to later steps.
        train(wanted, tmp_path / "b", notes, stop_after=stop, checkpoint_seconds=seconds)
    again = train(wanted, tmp_path / "b", notes)
    assert_equal(undisturbed, again)
    told = {(e["step"], e["kind"]): e for e in notes.events}
    assert [told[e["step"], e["kind"]] for e in whole.events] == whole.events
    if watch["patience"] == 1000:
        wanted = poisoned(tokens, tmp_path / "two", **change).model_copy(update={"replicas": 2})
        two = train_notes(wanted, tmp_path / "two")
        places = [[(e["step"], e["documents"]) for e in notes.events] for notes in (two, whole)]
        assert places[0] == places[1]


def change_batches(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, dict[str, Any]], None]) -> None:
    """Call `change` with the number and the micro-batch of each step."""
    plain, calls = module.micro_batches, itertools.count()

    def changed(record: Any, *where: Any) -> Any:
        parts = plain(record, *where)
        change(next(calls), parts[0])
        return parts

    monkeypatch.setattr(module, "micro_batches", changed)


def test_rollback_restores_last_snapshot(tmp_path: Path) -> None:
    # The letter x is in no text: its NaN embedding matters only in the two modified batches.
    tokens = make_tokens(tmp_path / "tokens")
    watch = {"patience": 2, "snapshot_every": 3, "max_rollbacks": 1, "max_skipped": 1.0}

    def spoil(number: int, batch: dict[str, Any]) -> None:
        if number in (4, 5):
            batch["loss_mask"][:] = False
            batch["loss_mask"][0, 0] = True
            batch["tokens"][:] = ord("x")

    notes = Notes()
    with pytest.MonkeyPatch.context() as patched:
        change_batches(patched, spoil)
        wanted = poisoned(tokens, tmp_path / "a", steps=9, spike_guard=watch)
        back = train(wanted, tmp_path / "a", notes, stop_after=6, checkpoint_seconds=0.0)
    last = notes.events[-1]  # steps 5 and 6 are bad
    assert last["kind"] == "rollback" and "rolled back to step 3" in last["action"]
    poisoned(tokens, tmp_path / "b", steps=9, spike_guard=watch)
    assert_equal(back, train(wanted, tmp_path / "b", stop_after=3))


@pytest.mark.parametrize("replicas", [1, 2])
def test_skipped_step_changes_nothing(tokens: Path, tmp_path: Path, replicas: int) -> None:
    model, routing = shape(HEADS, experts=EXPERTS, tie_embeddings=False), {"bias_update_rate": 0.01}
    wanted = poisoned(tokens, tmp_path, ids=slice(None), model=model, routing=routing, steps=6)
    wanted = wanted.model_copy(update={"replicas": replicas})
    before, notes = module.build_model(wanted).state_dict(), Notes()
    after = train(wanted, tmp_path, notes).state_dict()
    assert len(notes.events) == 6 and not notes.steps
    assert all(torch.equal(after[n], t) for n, t in before.items() if n != "embedding")
    assert any(n.endswith("balance_bias") for n in before)


def test_batch_without_target_is_skipped(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mask(number: int, batch: dict[str, Any]) -> None:
        if number % 3 == 1:
            batch["loss_mask"][:] = False

    change_batches(monkeypatch, mask)
    notes = Notes()
    model = train(job(tokens, spike_guard={"max_skipped": 1.0}), tmp_path, notes)
    assert [(e["step"], e["kind"]) for e in notes.events] == [(n, "empty") for n in (2, 5, 8, 11)]
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("kind", ["decoder", "llama"])
def test_huge_learning_rate_raises_with_remedy(tokens: Path, tmp_path: Path, kind: str) -> None:
    rates = {"lr_muon": 1e3, "lr_embedding": 1e3, "lr_scalar": 1e3, "lr_ngram": 1e3}
    more = {} if kind == "decoder" else {"model": shape(HEADS)}
    with pytest.raises(DivergedError, match=r"optim\.lr_muon=") as raised:
        train(job(tokens, optim=rates, steps=200, **more), tmp_path)
    assert "steps in a row" in str(raised.value) or "uniform predictions" in str(raised.value)


def test_raw_text_events_list_blocks(tokens: Path, tmp_path: Path) -> None:
    stream = {**raw_text(tokens, tmp_path), "shuffle_bytes": 500, "block_bytes": 250}
    wanted = poisoned(tokens, tmp_path / "a", ids=slice(None), stream=stream, steps=6)
    events = train_notes(wanted, tmp_path / "a").events
    assert len(events) == 6
    places = [{d["offset"] for d in e["documents"]} for e in events]
    assert all(d["path"].endswith("raw.jsonl") for e in events for d in e["documents"])
    assert all(places) and len(set(map(frozenset, places))) > 1


def test_overflow_in_first_step_keeps_baseline_loss() -> None:
    """Some networks start above the uniform loss. fp16's first step often overflows with a finite loss."""
    guard = make_guard()
    assert not guard.accept_step({**step_metrics(20.0, math.inf), "overflow": 1.0})
    assert all(guard.accept_step(step_metrics(20.0, 1.0)) for _ in range(200))
    assert not guard.needs_rollback
