"""Bursts: several decode steps in one native call give the tokens of single steps, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.support.compiler import needs_compiler
from tests.support.engine.parity import FAMILIES, assert_same, config, decoder, drain, request, run, tokens_of

from whorl.engine.cpu import unsupported_reason
from whorl.engine.engine import Engine
from whorl.engine.request import Request, Token
from whorl.engine.sampling_params import SamplingParams

pytestmark = needs_compiler

NATIVE = [name for name, make in FAMILIES.items() if unsupported_reason(make()) is None]


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native step without timing."""
    monkeypatch.setattr("whorl.engine.cpu.runner.choose_once", lambda *_: "native")


def requests(n: int = 7, **fields: Any) -> list[Request]:
    """Prompts of several lengths, greedy and sampled, with different limits."""
    made = []
    for k in range(n):
        ids = torch.randint(0, 50, (3 + 2 * k,), generator=torch.Generator().manual_seed(k)).tolist()
        cuts = [{"top_p": 1}, {"top_p": 0.9}, {"top_p": 1, "top_k": 12}, {"min_p": 0.1}][k % 4]
        sampling = SamplingParams(temperature=[1.0, 0.7, 3.0, 2.0, 0][k % 5], seed=k, **cuts)
        made.append(request(str(k), ids, sampling=sampling, max_tokens=5 + 3 * k, **fields))
    return made


def counted(engine: Engine) -> list[int]:
    """A list that gets the tokens of a row, at most, of each burst of the engine."""
    calls: list[int] = []
    assert engine.burst is not None
    decode = engine.burst.runner.decode

    def counting(batch: Any, draws: Any) -> None:
        calls.append(draws.ids.shape[1])
        decode(batch, draws)

    engine.burst.runner.decode = counting  # type: ignore[method-assign]
    return calls


def made(model: Any, burst: int, **changes: Any) -> Engine:
    """Prompts are computed whole, since the bits of a prompt depend on its chunks."""
    sizes = {"max_num_batched_tokens": 512, "max_decode_slowdown": math.inf, "decode_burst": burst}
    return Engine(model, config(**{**sizes, **changes}), banned_ids=[0, 7])


@pytest.mark.parametrize("slots", [3, 8])
@pytest.mark.parametrize("family", NATIVE)
def test_burst_gives_the_tokens_of_single_steps(family: str, slots: int) -> None:
    """With fewer slots than requests a burst ends with the first row; with a slot for each, rows leave one by one."""
    model = FAMILIES[family]()
    single, several = (made(model, burst, max_num_seqs=slots) for burst in (1, 6))
    calls = counted(several)
    expected = run(single, requests(stop_ids=frozenset({3, 11})))
    assert run(several, requests(stop_ids=frozenset({3, 11}))) == expected
    assert calls and max(calls) == 6
    assert several.stats.output_tokens == single.stats.output_tokens
    assert several.stats.steps < single.stats.steps
    assert several.stats.drafted_tokens == 0
    assert several.scheduler.virtual_counters == single.scheduler.virtual_counters


def test_burst_in_a_small_cache() -> None:
    """Where pages are missing, steps are single, and sequences are preempted and computed again."""
    single, several = (made(decoder(), burst, kv_cache_tokens=64) for burst in (1, 8))
    expected = run(single, requests())
    for name, tokens in run(several, requests()).items():
        assert_same(tokens, expected[name])
    assert several.scheduler.n_preemptions > 0 and single.scheduler.n_preemptions > 0


def test_burst_continues_cached_prefixes() -> None:
    """Pages that a burst filled are shared with later requests."""
    model = decoder()
    engine = made(model, 8)
    first = run(engine, [request("a", range(1, 9), max_tokens=20)])["a"]
    ids = [*range(1, 9), *(t.id for t in first)]
    again = drain(engine, [request("b", [*ids, 5], max_tokens=4)])["b"]
    assert again[0].cached_tokens >= 24
    assert_same(tokens_of(again), run(made(model, 1), [request("b", [*ids, 5], max_tokens=4)])["b"])


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": (b"x",)},
        {"top_log_probs": 2},
        {"sampling": SamplingParams(temperature=1, top_p=1, presence_penalty=0.5)},
    ],
)
def test_other_options_take_single_steps(fields: dict[str, Any]) -> None:
    model = decoder()
    table = [bytes([65 + i]) for i in range(50)]
    engines = [
        Engine(model, config(decode_burst=burst), token_bytes=table, banned_ids=[0]) for burst in (1, 8)
    ]
    calls = counted(engines[1])
    one = request("a", [1, 2, 3], **{"max_tokens": 12, **fields})
    found: list[list[Token]] = [run(engine, [one])["a"] for engine in engines]
    assert found[0] == found[1] and len(found[0]) > 1
    assert not calls


def test_a_burst_starts_behind_a_forced_prefix() -> None:
    table = [bytes([65 + i]) for i in range(50)]
    engines = [Engine(decoder(), config(decode_burst=burst), token_bytes=table) for burst in (1, 8)]
    calls = counted(engines[1])
    one = request("a", [1, 2, 3], max_tokens=12, forced_prefix=b"ABCA")
    found = [tokens_of(drain(engine, [one])["a"]) for engine in engines]
    assert found[0] == found[1] and [t.id for t in found[0][:4]] == [0, 1, 2, 0]
    assert calls


def test_a_row_that_cannot_be_drawn_ends_alone() -> None:
    """NaN in the embedding of one id: the row that draws it is aborted, in the middle of a burst too."""
    model = decoder(tie_embeddings=False)
    with torch.no_grad():
        model.embedding[13] = float("nan")
    bias = SamplingParams(temperature=2.5, top_p=1, seed=3)
    made_requests = [request(str(k), [1, 2, k + 14], sampling=bias.model_copy(update={"seed": k}), max_tokens=12)
                     for k in range(9)]  # fmt: skip
    single, several = (drain(made(model, burst), made_requests) for burst in (1, 8))
    ends = {name: (tokens_of(d), d[-1].finish_reason) for name, d in single.items()}
    assert {name: (tokens_of(d), d[-1].finish_reason) for name, d in several.items()} == ends
    assert {"abort", "length"} == {reason for _, reason in ends.values()}
