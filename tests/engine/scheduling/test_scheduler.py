"""The scheduler: budgets, priorities, fairness, preemption, weight updates, rejected requests."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.engine.parity import PROMPTS, check, decoder, drain, run, tokens_of
from tests.support.models.transformer_shapes import HEADS, made

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.scheduling.prefill_budget import MAX_CONSECUTIVE_MIXED_STEPS, MEDIAN_WINDOW, PrefillBudget
from whorl.errors import ConfigError
from whorl.slots.board import Board

GREEDY = SamplingParams(temperature=0)
SMALL = EngineConfig(block_size=4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=16)


def request(name: str, n: int = 5, **fields: Any) -> Request:
    return Request(
        **{"id": name, "ids": tuple(range(1, n + 1)), "sampling": GREEDY, "max_tokens": 6, **fields}
    )


def finished(engine: Engine) -> list[str]:
    """Ids of the requests in the order in which they finish."""
    order = []
    while engine.busy:
        order += [d.request_id for d in engine.step() if d.finish_reason]
        engine.check_integrity()
    return order


def test_step_keeps_budget_and_includes_all_decoding() -> None:
    engine = Engine(decoder(), SMALL)
    for n, ids in enumerate(PROMPTS):
        engine.add(request(str(n), ids=tuple(ids), max_tokens=12))
    while engine.busy:
        decoding = {s.request.id for s in engine.scheduler.running if s.decoding}
        updated = {d.request_id for d in engine.step()}
        assert decoding <= updated
        assert (
            engine.stats.recent_steps[-1].prefill_tokens + engine.stats.recent_steps[-1].decode_tokens <= 16
        )


def test_lower_priority_number_is_served_first() -> None:
    engine = Engine(decoder(), SMALL.model_copy(update={"max_num_seqs": 1}))
    for name, priority in (("later", 5), ("urgent", -1), ("usual", 0)):
        engine.add(request(name, priority=priority))
    assert finished(engine) == ["urgent", "usual", "later"]


def test_clients_get_fair_shares() -> None:
    engine = Engine(decoder(), SMALL.model_copy(update={"max_num_seqs": 1}))
    for n in range(6):
        engine.add(request(f"many {n}", client="many"))
    engine.step()  # the first one starts
    engine.add(request("few", client="few"))
    assert finished(engine).index("few") <= 1


def test_long_prompt_is_prefilled_in_chunks() -> None:
    engine = Engine(decoder(), SMALL)
    engine.add(request("short", max_tokens=30))
    engine.step()
    engine.add(request("long", ids=tuple(range(1, 41)), max_tokens=2))
    between = 0
    while "long" in {s.request.id for s in engine.sequences()}:
        between += any(d.request_id == "short" for d in engine.step())
    assert between >= 3


def test_prefill_budget_bounds_decode_slowdown() -> None:
    budget = PrefillBudget(max_decode_slowdown=1.5)
    assert budget.max_prefill_tokens(0, 512) == 512 and budget.max_prefill_tokens(4, 512) < 512
    for _ in range(50):
        budget.record_step(4, 0, 0.010)
        budget.record_step(4, 100, 0.010 + 100 * 1e-4)
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.005 / 1e-4, rel=0.1)
    for _ in range(MEDIAN_WINDOW // 2):  # a few slow steps, from background load
        budget.record_step(4, 0, 0.2)
        budget.record_step(4, 100, 0.2)
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.005 / 1e-4, rel=0.1)
    for _ in range(MEDIAN_WINDOW // 2 + 1):  # longer sequences
        budget.record_step(4, 0, 0.020)
        budget.record_step(4, 100, 0.020 + 100 * 1e-4)
    assert budget.max_prefill_tokens(4, 512) == pytest.approx(0.010 / 1e-4, rel=0.1)
    slow = PrefillBudget(1.5, slo_tpot=0.030)
    slow.record_step(4, 0, 0.010)
    slow.record_step(4, 100, 0.020)
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
    engine = Engine(decoder(), SMALL)
    for n, ids in enumerate(PROMPTS):
        engine.add(request(str(n), ids=tuple(ids)))
    engine.step()
    assert engine.abort("0") and engine.abort("5") and not engine.abort("0") and not engine.abort("nobody")
    engine.check_integrity()
    ends: dict[str, Any] = {}
    while engine.busy:
        ends |= {d.request_id: d.finish_reason for d in engine.step() if d.finish_reason}
    assert ends == {"0": "abort", "5": "abort", **dict.fromkeys("1234", "length")}
    assert engine.cache.groups[0].pool.n_used == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_history_finishes_all_requests(seed: int) -> None:
    """Random arrivals and aborts with a cache for little more than one request: all finish, as alone."""
    model, rng = decoder(), random.Random(seed)
    settings = {"preemption": rng.choice(["recompute", "swap"]), "kv_cache_tokens": rng.choice([40, 64, 200])}
    engine = Engine(
        model, SMALL.model_copy(update={**settings, "max_num_batched_tokens": rng.choice([1, 5, 16])})
    )
    waiting = [
        request(str(n), ids=tuple(rng.choices(range(50), k=rng.randint(1, 20))), max_tokens=rng.randint(1, 12),
                sampling=SamplingParams(seed=n), priority=rng.randint(0, 2), client=rng.choice("ab"))
        for n in range(25)
    ]  # fmt: skip
    all_requests, out, ends = list(waiting), {r.id: [] for r in waiting}, {}
    for _ in range(5000):
        while waiting and rng.random() < 0.4:
            engine.add(waiting.pop())
        if rng.random() < 0.05 and engine.sequences():
            engine.abort(rng.choice(engine.sequences()).request.id)
        for d in engine.step():
            out[d.request_id] += d.tokens
            if d.finish_reason:
                assert d.request_id not in ends
                ends[d.request_id] = d.finish_reason
        engine.check_integrity()
        if not waiting and not engine.busy:
            break
    assert len(ends) == 25 and engine.cache.groups[0].pool.n_used == 0
    alone = Engine(
        model, EngineConfig(block_size=4, max_num_seqs=1, max_model_len=64, enable_prefix_caching=False)
    )
    for one in all_requests:
        if ends[one.id] != "abort":
            assert [t.id for t in run(alone, [one])[one.id]] == [t.id for t in out[one.id]]


def test_new_weights_apply_between_steps_with_version() -> None:
    model, other = decoder(), decoder()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.7)
    board = Board.from_tensors(dict(other.named_parameters()))
    board.publish(dict(other.named_parameters()), 3)
    engine = Engine(model, SMALL)
    first = request("first", n=9)
    check(decoder(), [first], run(engine, [first]))
    engine.add(request("during", n=9))
    engine.step()
    engine.follow_board(board)
    tokens = [t for ds in drain(engine).values() for t in tokens_of(ds)]
    assert {t.version for t in tokens} == {3}
    after = request("after", n=9)
    out = run(engine, [after])
    check(other, [after], out)  # no cached prefix of the old weights or of both was used
    with pytest.raises(ConfigError, match="no such parameter"):
        engine.update_weights({"nothing": torch.zeros(1)}, 4)
    assert engine.version == 3


def test_update_weights_can_recompute_running_requests() -> None:
    other = decoder()
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(0.7)
    engine = Engine(decoder(), SMALL)
    one = request("one", n=9)
    engine.add(one)
    before = [t for d in engine.step() for t in d.tokens]
    engine.update_weights(dict(other.named_parameters()), 1, recompute=True)
    after = [t for ds in drain(engine).values() for t in tokens_of(ds)]
    rest = one.model_copy(update={"ids": (*one.ids, *(t.id for t in before)), "max_tokens": len(after)})
    check(other, [rest], {"one": after})


def test_prompt_log_probs_match_forward() -> None:
    model = decoder()
    engine = Engine(model, SMALL.model_copy(update={"max_num_batched_tokens": 7}))
    ids = tuple(PROMPTS[5])
    engine.add(Request(id="scored", ids=ids, sampling=GREEDY, max_tokens=2, prompt_log_probs=True))
    updated = [d.prompt_log_probs for d in drain(engine)["scored"] if d.prompt_log_probs]
    with torch.no_grad():
        want = model.logits(model(torch.tensor([ids])))[0, :-1].log_softmax(-1)
    want = want.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert len(updated) == 1
    torch.testing.assert_close(torch.tensor(updated[0]), want, atol=1e-4, rtol=0)


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
    engine = Engine(decoder(), SMALL)
    with pytest.raises(ConfigError, match=message):
        engine.add(request("one", **fields))
    assert not engine.busy
    with pytest.raises(ValidationError):
        request("two", ids=())


def test_small_cache_rejects_prompt_or_ends_output() -> None:
    engine = Engine(decoder(), SMALL.model_copy(update={"kv_cache_tokens": 16}))
    with pytest.raises(ConfigError, match="the cache holds 16"):
        engine.add(request("long", ids=(1,) * 20))
    engine.add(request("one", n=10, max_tokens=30))
    deltas = drain(engine)["one"]
    assert deltas[-1].finish_reason == "length" and sum(len(d.tokens) for d in deltas) == 6
    engine.check_integrity()


def test_sequence_preempted_at_first_token_resumes() -> None:
    engine = Engine(decoder(), SMALL)
    one = request("one")
    engine.add(one)
    engine.step()
    engine.scheduler.preempt(engine.sequences()[0])
    rest = [t for ds in drain(engine).values() for t in tokens_of(ds)]
    assert len(rest) == 5


def test_windowed_model_uses_pages_of_window_only() -> None:
    local = HEADS.model_copy(update={"window": 6})
    engine = Engine(made(mixers={"local": local}).eval(), SMALL.model_copy(update={"kv_cache_tokens": 400}))
    engine.add(request("one", n=20, max_tokens=40))
    max_used = 0
    while engine.busy:
        engine.step()
        max_used = max(max_used, engine.cache.groups[0].pool.n_used)
    assert max_used <= (6 + 16) // 4 + 2
