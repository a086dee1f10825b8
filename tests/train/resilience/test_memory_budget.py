"""Activation budgets: equal weights, errors with remedies, parsing of memory amounts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.train.model_shapes import EXPERTS, HEADS, shape
from tests.support.train.pretraining import assert_equal, train
from tests.support.train.tiny import job

from whorl.errors import BudgetError
from whorl.models.activation_checkpointing import measure_activation_memory
from whorl.train.job import Job, identity
from whorl.train.lm.build import build_model
from whorl.train.resilience.memory_budget import (
    blocks_to_checkpoint,
    job_activation_checkpointing,
    resolve_micro_batch_size,
)
from whorl.train.resilience.oom_advice import suggest

MIXTURE = shape(HEADS, experts={**EXPERTS, "token_dropout": 0.2})


def least(wanted: Job) -> int:
    seen = measure_activation_memory(build_model(wanted), wanted.seq_len)
    return seen.at_rows(resolve_micro_batch_size(wanted)).min_peak


def within(wanted: Job, budget: str, **change: object) -> Job:
    return wanted.model_copy(update={"activation_budget": budget, **change})


CHANGES: dict[str, dict[str, object]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 2},
    "experts and chance": {"model": MIXTURE},
    "fp8": {"dtype": "float8"},  # fp8 scales are per product, so recomputation rounds equally
    "fp16": {"dtype": "float16"},
}


@pytest.mark.parametrize("change", CHANGES)
def test_activation_budget_gives_same_weights(tokens: Path, tmp_path: Path, change: str) -> None:
    free = job(tokens, steps=6, **CHANGES[change])
    tight = within(free, f"{least(free)}B")
    assert build_model(tight).checkpointed_blocks > 0 == build_model(free).checkpointed_blocks
    assert_equal(train(free, tmp_path / "free"), train(tight, tmp_path / "tight"))


def test_activation_budget_is_not_part_of_identity(tokens: Path) -> None:
    assert identity(job(tokens)) == identity(job(tokens, activation_budget="1MB"))


def test_activation_budget_larger_recomputes_less(tokens: Path) -> None:
    wanted = job(tokens)
    seen = measure_activation_memory(build_model(wanted), wanted.seq_len)
    low, high = seen.at_rows(8).min_peak, seen.at_rows(8).peak(0)
    counts = [blocks_to_checkpoint(seen, budget, 8) for budget in range(low, high + 1, (high - low) // 20)]
    assert counts == sorted(counts, reverse=True) and counts[0] > 0
    assert blocks_to_checkpoint(seen, high, 8) == 0
    half = within(wanted, f"{2 * seen.at_rows(4).min_peak}B", replicas=2)
    assert job_activation_checkpointing(build_model(wanted), half).checkpointed_blocks > 0


def test_activation_budget_too_small_names_remedies(tokens: Path) -> None:
    wanted = job(tokens)
    half = f"{least(wanted) // 2}B"
    with pytest.raises(BudgetError, match=r"pretrain\.run\.activation_budget is") as raised:
        build_model(within(wanted, half))
    remedies = r"--set pretrain\.run\.activation_budget=([^;]+); --set pretrain\.train\.micro_batch_size=(\d+) \(now 8 rows"
    budget, rows = re.findall(remedies, str(raised.value))[0]
    assert build_model(within(wanted, budget)).checkpointed_blocks > 0, "what is typed suffices"
    build_model(within(wanted, half, micro_batch_size=int(rows)))
    with pytest.raises(BudgetError) as raised:
        build_model(within(wanted, "10B"))
    assert "micro_batch_size" not in str(raised.value), "one row needs more"


def test_oom_advice_names_activation_budget(tokens: Path) -> None:
    assert "pretrain.run.activation_budget=25% (now none" in str(suggest(MemoryError(), job(tokens)))
    tight = job(tokens, activation_budget="2GB")
    assert "pretrain.run.activation_budget=1000000000B (now 2000000000B)" in str(
        suggest(MemoryError(), tight)
    )
