"""The scheduler: budgets, priorities, fairness, preemption, weight updates, rejected requests."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.engine.parity import PROMPTS, check, config, decoder, drain, request, run, tokens_of
from tests.support.models.transformer_shapes import HEADS, made

from whorl.engine.engine import Engine
from whorl.engine.request import Token
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.scheduler import MAX_CONSECUTIVE_MIXED_STEPS, MEDIAN_WINDOW, PrefillBudget
from whorl.errors import ConfigError
from whorl.models import Transformer
from whorl.slots.board import Board


def small_engine(**changes: Any) -> Engine:
    return Engine(decoder(), config(**changes))


@pytest.fixture
def other() -> Transformer:
    """The same model with other weights."""
    model = decoder()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)
    return model


def remaining_tokens(engine: Engine) -> list[Token]:
    """The tokens of all requests until the engine is idle."""
    return [token for deltas in drain(engine).values() for token in tokens_of(deltas)]


def test_step_keeps_budget_and_includes_all_decoding() -> None:
    engine = small_engine()
    for n, ids in enumerate(PROMPTS):
        engine.add(request(str(n), ids, max_tokens=12))
    while engine.busy:
        decoding = {s.request.id for s in engine.scheduler.running if s.decoding}
        assert decoding <= {d.request_id for d in engine.step()}
        last = engine.stats.recent_steps[-1]
        assert last.prefill_tokens + last.decode_tokens <= 16


def test_prompt_in_the_cache_has_its_first_token_in_its_first_step() -> None:
    engine = small_engine()
    ids = (1, 2, 3, 4, 5, 6, 7, 8, 9)  # all pages but the last id
    drain(engine, [request("first", ids)])
    engine.add(request("again", ids))
    (delta,) = engine.step()
    assert delta.cached_tokens == 8 and len(delta.tokens) == 1


def test_lower_priority_number_is_served_first() -> None:
    engine = small_engine(max_num_seqs=1)
    for name, priority in (("later", 5), ("urgent", -1), ("usual", 0)):
        engine.add(request(name, priority=priority))
    assert list(drain(engine)) == ["urgent", "usual", "later"]


def test_clients_get_fair_shares() -> None:
    engine = small_engine(max_num_seqs=1)
    for n in range(6):
        engine.add(request(f"many {n}", client="many"))
    engine.step()  # the first one starts
    engine.add(request("few", client="few"))
    assert list(drain(engine)).index("few") <= 1


def record(budget: PrefillBudget, decode: float, prefill: float, times: int = 1) -> None:
    """Record pairs of steps: `decode` seconds alone, and `prefill` seconds more with 100 prompt tokens."""
    for _ in range(times):
        budget.record_step(4, 0, decode)
        budget.record_step(4, 100, decode + prefill)


def test_prefill_budget_bounds_decode_slowdown() -> None:
    budget = PrefillBudget(max_decode_slowdown=1.5)
    assert budget.max_prefill_tokens(0, 512) == 512 and budget.max_prefill_tokens(4, 512) < 512
    record(budget, 0.010, 100 * 1e-4, times=50)
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.005 / 1e-4, rel=0.1)
    record(budget, 0.2, 0.0, times=MEDIAN_WINDOW // 2)  # a few slow steps, from background load
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.005 / 1e-4, rel=0.1)
    record(budget, 0.020, 100 * 1e-4, times=MEDIAN_WINDOW // 2 + 1)  # longer sequences
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.010 / 1e-4, rel=0.1)
    slow = PrefillBudget(1.5, slo_tpot=0.030)
    record(slow, 0.010, 0.010)
    assert slow.max_prefill_tokens(4, 512) == pytest.approx(200, rel=0.01)
    strict = PrefillBudget(1.0)
    strict.record_step(4, 0, 0.010)
    for _ in range(MAX_CONSECUTIVE_MIXED_STEPS):
        assert strict.max_prefill_tokens(4, 512) >= 1  # every prompt finishes
        strict.record_step(4, 1, 0.011)
    assert strict.max_prefill_tokens(4, 512) == 0  # the next step measures decoding alone
    strict.record_step(4, 0, 0.010)
    assert strict.max_prefill_tokens(4, 512) == 1
    unlimited = PrefillBudget(math.inf)  # the limit does not depend on measurements
    for _ in range(MAX_CONSECUTIVE_MIXED_STEPS + 1):
        assert unlimited.max_prefill_tokens(4, 512) == 512
        unlimited.record_step(4, 100, 0.010)


def test_abort_ends_request_and_frees_pages() -> None:
    engine = small_engine()
    for n, ids in enumerate(PROMPTS):
        engine.add(request(str(n), ids))
    engine.step()
    assert engine.abort("0") and engine.abort("5") and not engine.abort("0") and not engine.abort("nobody")
    ends = {name: deltas[-1].finish_reason for name, deltas in drain(engine).items()}
    assert ends == {"0": "abort", "5": "abort", **dict.fromkeys("1234", "length")}
    assert engine.cache.groups[0].pool.n_used == 0


def test_new_weights_apply_between_steps_with_version(other: Transformer) -> None:
    board = Board.from_tensors(dict(other.named_parameters()))
    board.publish(dict(other.named_parameters()), 3)
    engine = small_engine()
    first, during, after = (request(name, range(1, 10)) for name in ("first", "during", "after"))
    check(decoder(), [first], run(engine, [first]))
    engine.add(during)
    engine.step()
    engine.follow_board(board)
    assert {t.version for t in remaining_tokens(engine)} == {3}
    check(other, [after], run(engine, [after]))  # no cached prefix of the old weights or of both was used
    with pytest.raises(ConfigError, match="no such parameter"):
        engine.update_weights({"nothing": torch.zeros(1)}, 4)
    assert engine.version == 3


def test_update_weights_can_recompute_running_requests(other: Transformer) -> None:
    engine, one = small_engine(), request("one", range(1, 10))
    engine.add(one)
    before = [t for d in engine.step() for t in d.tokens]
    engine.update_weights(dict(other.named_parameters()), 1, recompute=True)
    after = remaining_tokens(engine)
    rest = one.model_copy(update={"ids": (*one.ids, *(t.id for t in before)), "max_tokens": len(after)})
    check(other, [rest], {"one": after})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ids": (50,)}, "50 is not an id of this model"),
        ({"ids": (1,) * 64}, "the prompt has 64 tokens and the model's context holds 64"),
        ({"sampling": SamplingParams(logit_bias={99: 1.0})}, "logit_bias has the id 99"),
        ({"adapter": "nobody"}, "'nobody' is not loaded"),
        ({"forced_prefix": b"x"}, "no token_bytes"),
    ],
)
def test_add_rejects_impossible_requests(fields: dict[str, Any], message: str) -> None:
    engine = small_engine()
    with pytest.raises(ConfigError, match=message):
        engine.add(request("one", **fields))
    assert not engine.busy
    with pytest.raises(ValidationError):
        request("two", ids=())


def test_small_cache_rejects_prompt_or_ends_output() -> None:
    engine = small_engine(kv_cache_tokens=16)
    with pytest.raises(ConfigError, match="the cache holds 16"):
        engine.add(request("long", (1,) * 20))
    deltas = drain(engine, [request("one", range(1, 11), max_tokens=30)])["one"]
    assert deltas[-1].finish_reason == "length" and sum(len(d.tokens) for d in deltas) == 6


def test_sequence_preempted_at_first_token_resumes() -> None:
    engine = small_engine()
    engine.add(request())
    engine.step()
    engine.scheduler.preempt(engine.sequences()[0])
    assert len(remaining_tokens(engine)) == 5


def test_windowed_model_uses_pages_of_window_only() -> None:
    local = HEADS.model_copy(update={"window": 6})
    engine = Engine(made(mixers={"local": local}).eval(), config(kv_cache_tokens=400))
    engine.add(request("one", range(1, 21), max_tokens=40))
    max_used = 0
    while engine.busy:
        engine.step()
        max_used = max(max_used, engine.cache.groups[0].pool.n_used)
    assert max_used <= (6 + 16) // 4 + 2
