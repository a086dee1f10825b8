"""The spike guard: decisions, rollbacks and limits, exact on all replicas and after a resume."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.train.learners import networks, part, squared
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.poisoned_tokens import BAD, make_poisoned, poisoned
from tests.support.train.pretraining import raw_text, train
from tests.support.train.spike_guards import make_guard, step_metrics
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.errors import DataError
from whorl.models import Decoder
from whorl.parallel.process_group import ProcessGroup, spawn_replicas
from whorl.tokens.loader import open_batches
from whorl.tokens.tokenizer import Tokenizer
from whorl.train.config import SpikeGuardConfig
from whorl.train.job import Job
from whorl.train.learner.learner import Learner, SharedState
from whorl.train.learner.loop import train_loop
from whorl.train.learner.update import DivergedError, Update, all_adamw
from whorl.train.lm import pretrain as module
from whorl.train.resilience.spike_guard import SpikeGuard


def ripple(step: int) -> dict[str, float]:
    return step_metrics(2 + 0.1 * math.sin(step), 0.5 + 0.1 * math.cos(3 * step))


def test_spike_guard_rejects_spikes_not_ripples() -> None:
    guard = make_guard()
    assert all(guard.accept_step(ripple(step)) for step in range(40))
    assert guard.accept_step(step_metrics(2.5, 0.9)), "a hard batch is no spike"
    assert not guard.accept_step(step_metrics(5.0)) and "loss is 5" in guard.events[-1]["message"]
    assert (
        not guard.accept_step(step_metrics(norm=20.0))
        and "gradient norm is 20" in guard.events[-1]["message"]
    )
    assert [e["step"] for e in guard.events] == [42, 43] and guard.skipped == 2
    assert all(
        make_guard(threshold=0.0).accept_step(f) for f in (*map(ripple, range(40)), step_metrics(1e9, 1e9))
    )


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
    slow = make_guard(threshold=0.0)
    assert (
        all(slow.accept_step(step_metrics(9.0 - step / 100)) for step in range(200))
        and not slow.diverged_steps
    ), "begins high"


def test_spike_guard_median_is_robust_to_earlier_spikes() -> None:
    guard = make_guard(patience=100)
    for step in range(32):
        guard.accept_step(ripple(step))
    assert [guard.accept_step(step_metrics(50.0 if step % 4 == 0 else 2.0)) for step in range(32)] == [
        step % 4 != 0 for step in range(32)
    ]
    kept = [guard.accept_step(step_metrics(6.0)) for _ in range(40)]
    assert not kept[0] and kept[-1]


@pytest.mark.parametrize(
    "bad",
    [step_metrics(math.nan), step_metrics(math.inf), step_metrics(norm=math.nan), step_metrics(count=0.0)],
)
def test_spike_guard_rejects_nonfinite_and_empty(bad: dict[str, float]) -> None:
    guard = make_guard()
    assert not guard.accept_step(bad) and guard.accept_step(step_metrics())
    json.dumps(guard.state, allow_nan=False)


def test_spike_guard_state_restores_decisions() -> None:
    rng = np.random.default_rng(0)
    seen = [step_metrics(*rng.lognormal(0, 0.4, 2) * rng.choice([1, 1, 1, 9], 2)) for _ in range(300)]
    whole = make_guard(patience=1000)
    answers = [whole.accept_step(f) for f in seen]
    parts = make_guard(patience=1000)
    again = []
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
    nets = networks()
    before = {n: p.detach().clone() for n, p in nets.named_parameters()}
    learner = Learner(nets, [Update(squared(nets["a"]), all_adamw(nets, 0.1, "a."))])
    bad = part()
    bad["x"][3, 1] = math.nan  # type: ignore[index]
    with pytest.raises(DivergedError, match=r"the loss is nan(.|\n)*check the data or the rewards for NaN"):
        train_loop(learner, iter([bad]), lambda p: [[p]], last=1)
    assert all(torch.equal(before[n], p) for n, p in nets.named_parameters())


def _two(world: ProcessGroup, shared: SharedState, seen: torch.Tensor) -> None:
    """Replica 1 has NaN in its third batch."""
    nets = networks()
    guard = SpikeGuard(SpikeGuardConfig(), uniform_loss=1e9, steps=100)
    learner = Learner(
        nets,
        [Update(squared(nets["a"]), all_adamw(nets, 0.1, "a."), accept_step=guard.accept_step)],
        shared,
        world,
    )

    def after(step: int, metrics: dict[str, float], clock: object) -> None:
        seen[world.rank, step - 1] = nets["a"].weight.detach()
        world.all_gather_scalars()
        assert ("skipped" in metrics) == (step == 3)

    records = [part(seed=10 * world.rank + step) for step in range(5)]
    if world.rank == 1:
        records[2]["y"][0] = math.nan  # type: ignore[index]
    train_loop(learner, iter(records), lambda p: [[p]], last=5, on_step_end=after)


def test_nan_on_one_replica_skips_on_both() -> None:
    nets = networks()
    param_optims = all_adamw(nets, 0.1, "a.")
    shared = SharedState.allocate(nets, param_optims, replicas=2)
    seen = torch.zeros(2, 5, 1, 2).share_memory_()
    world = spawn_replicas(2, _two, shared, seen)
    try:
        _two(world, shared, seen)
    finally:
        world.close()
    assert torch.equal(seen[0], seen[1]) and bool(seen.isfinite().all())
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(seen[0])]
    assert moved == [True, False, True, True]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_poisoned(tmp_path_factory.mktemp("tokens"))


def same(a: Decoder, b: Decoder) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return all(torch.equal(t.nan_to_num(7.0), theirs[n].nan_to_num(7.0)) for n, t in ours.items())


def batches_with_x(tokens: Path, wanted: Job) -> list[int]:
    """Numbers of the batches that contain the letter x."""
    with open_batches(
        tokens, "train", seq_len=wanted.seq_len, batch_size=wanted.batch_size, serial=True
    ) as batches:
        return [n for n in range(wanted.steps) if (next(batches).data.tokens == ord("x")).any()]


def test_nan_batches_skipped_and_documents_listed(tokens: Path, tmp_path: Path) -> None:
    notes, messages = Notes(), list[str]()
    wanted = poisoned(tokens, tmp_path)
    assert Tokenizer.load(tokens).encode_document("x")[1] == ord("x")
    model = train(wanted, tmp_path, notes, log=messages.append)
    bad = batches_with_x(tokens, wanted)
    assert 2 < len(bad) < 20 and [e["step"] for e in notes.events] == [n + 1 for n in bad]
    for event in notes.events:
        assert event["kind"] == "nonfinite" and event["loss"] is None and event["documents"]
        assert f"id-{BAD}" in [d["id"] for d in event["documents"]], "the bad document"
        assert f"{BAD}.txt (id-{BAD})" in next(s for s in messages if s.startswith(f"step {event['step']}:"))
    kept = {n: p for n, p in model.named_parameters() if n != "embedding"}
    assert all(p.isfinite().all() for p in kept.values())
    assert all(math.isfinite(s["nll"]) for s in notes.steps) and notes.evaluations[-1]["held_out_nll"] < 5


def test_documents_in_batch_are_exact(tokens: Path) -> None:
    from whorl.train.resilience.provenance import documents_in_batch

    wanted = job(tokens)
    texts = {
        f"id-{n}": Tokenizer.load(tokens).encode_document(text).tolist()
        for n, text in enumerate(texts_of(tokens), start=5)
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
                    stretch = row[segments == segment].tolist()
                    inside = {i for i in named if str(stretch)[1:-1] in str(texts[i])}
                    assert inside, "tokens of a document that is not listed"
                    met |= inside
            assert met == named


def texts_of(tokens: Path) -> list[str]:
    from whorl.tokens.shards import TokenSet

    tokenizer = Tokenizer.load(tokens)
    return [
        tokenizer.decode(ids[1:-1].tolist()).decode()
        for ids in TokenSet(tokens).split("train").iter_documents()
    ]


@pytest.mark.parametrize(
    "watch", [{"patience": 1000}, {"patience": 1, "max_rollbacks": 1000, "snapshot_every": 4}]
)
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
    assert same(undisturbed, again)
    told = {(e["step"], e["kind"]): e for e in notes.events}
    assert [told[e["step"], e["kind"]] for e in whole.events] == whole.events
    if watch["patience"] == 1000:
        two = Notes()
        train(
            poisoned(tokens, tmp_path / "two", **change).model_copy(update={"replicas": 2}),
            tmp_path / "two",
            two,
        )
        assert [(e["step"], e["documents"]) for e in two.events] == [
            (e["step"], e["documents"]) for e in whole.events
        ]


def test_rollback_restores_last_snapshot(tmp_path: Path) -> None:
    # The letter x is in no text: its NaN embedding matters only in the two modified batches.
    tokens = make_tokens(tmp_path / "tokens")
    watch = {"patience": 2, "snapshot_every": 3, "max_rollbacks": 1, "max_skipped": 1.0}
    wanted = job(tokens, steps=9, spike_guard=watch)
    calls = itertools.count()
    plain = module._micro_batches

    def spoilt(record: Any, of: Job) -> Any:
        parts = plain(record, of)
        if next(calls) in (4, 5):
            parts[0]["loss_mask"][:] = False
            parts[0]["loss_mask"][0, 0] = True
            parts[0]["tokens"][:] = ord("x")  # NaN, as below
        return parts

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_micro_batches", spoilt)
        poisoned(tokens, tmp_path / "a", steps=9, spike_guard=watch)
        notes = Notes()
        back = train(wanted, tmp_path / "a", notes, stop_after=6, checkpoint_seconds=0.0)
    last = notes.events[-1]  # steps 5 and 6 are bad
    assert last["kind"] == "rollback" and "rolled back to step 3" in last["action"]
    poisoned(tokens, tmp_path / "b", steps=9, spike_guard=watch)
    three = train(wanted, tmp_path / "b", stop_after=3)
    assert same(back, three)


@pytest.mark.parametrize("replicas", [1, 2])
def test_skipped_step_changes_nothing(tokens: Path, tmp_path: Path, replicas: int) -> None:
    change: dict[str, Any] = {
        "model": shape(HEADS, experts=EXPERTS, tie_embeddings=False), "routing": {"bias_update_rate": 0.01}, "steps": 6
    }  # fmt: skip
    wanted = poisoned(tokens, tmp_path, ids=slice(None), **change).model_copy(update={"replicas": replicas})
    before = module.build_model(wanted).state_dict()
    notes = Notes()
    after = train(wanted, tmp_path, notes).state_dict()
    assert len(notes.events) == 6 and not notes.steps
    assert all(torch.equal(after[n], t) for n, t in before.items() if n != "embedding")
    assert any(n.endswith("balance_bias") for n in before)


def test_batch_without_target_is_skipped(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = module._micro_batches, itertools.count()

    def masked(record: Any, of: Job) -> Any:
        parts = plain(record, of)
        if next(calls) % 3 == 1:
            parts[0]["loss_mask"][:] = False
        return parts

    monkeypatch.setattr(module, "_micro_batches", masked)
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
    notes = Notes()
    wanted = poisoned(
        tokens,
        tmp_path / "a",
        ids=slice(None),
        stream={**raw_text(tokens, tmp_path), "shuffle_bytes": 500, "block_bytes": 250},
        steps=6,
    )
    train(wanted, tmp_path / "a", notes)
    assert len(notes.events) == 6
    places = [{d["offset"] for d in e["documents"]} for e in notes.events]
    assert all(d["path"].endswith("raw.jsonl") for e in notes.events for d in e["documents"])
    assert all(places) and len(set(map(frozenset, places))) > 1


def test_skipped_step_is_not_in_loss_curve(tokens: Path, tmp_path: Path) -> None:
    notes = Notes()
    train(poisoned(tokens, tmp_path), tmp_path, notes)
    assert len(notes.steps) + len(notes.events) == 48


def test_overflow_in_first_step_keeps_baseline_loss() -> None:
    """Some networks start above the uniform loss. fp16's first step often overflows with a finite loss."""
    guard = SpikeGuard(SpikeGuardConfig(), uniform_loss=5.0, steps=1000)
    assert not guard.accept_step(
        {"loss": 20.0, "nll": 20.0, "grad_norm": math.inf, "loss_tokens": 8.0, "overflow": 1.0}
    )
    for _ in range(200):
        assert guard.accept_step({"loss": 20.0, "nll": 20.0, "grad_norm": 1.0, "loss_tokens": 8.0})
    assert not guard.needs_rollback
