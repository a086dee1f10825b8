"""The schedule of a load: a pure function of configuration and seed."""

from __future__ import annotations

import itertools
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from whorl.errors import ConfigError, DataError
from whorl.loadtest.workload import (
    LengthDistribution,
    LoadConfig,
    PromptPool,
    arrival_times,
    parse_lengths,
    read_length_pairs,
    read_prompts,
    schedule_requests,
)
from whorl.tracking.seeds import numpy_rng

IDS = PromptPool(tuple(range(500)))
CONFIGS = st.builds(
    LoadConfig, requests=st.integers(1, 60), rate=st.floats(0.1, 100), burstiness=st.floats(0.1, 10),
    seed=st.integers(0, 5), prefix_tokens=st.integers(0, 40), n_prefixes=st.integers(1, 3),
    length_pairs=st.sampled_from([(), ((3, 4), (50, 6))]),
)  # fmt: skip


@given(CONFIGS)
def test_schedule_is_pure_and_prefix_stable(config: LoadConfig) -> None:
    found = schedule_requests(config, IDS)
    assert found == schedule_requests(config.model_copy(), IDS)
    assert [one.number for one in found] == list(range(config.requests))
    times = [one.send_time for one in found]
    assert times[0] == 0 and times == sorted(times)
    longer = schedule_requests(config.model_copy(update={"requests": config.requests + 17}), IDS)
    assert longer[: config.requests] == found


@given(CONFIGS)
def test_schedule_rate_scales_times_only(config: LoadConfig) -> None:
    assert config.rate is not None
    slow, fast = (
        schedule_requests(config, IDS),
        schedule_requests(config.model_copy(update={"rate": 2 * config.rate}), IDS),
    )
    assert [a.send_time for a in slow] == pytest.approx([2 * b.send_time for b in fast])
    assert [(a.prompt, a.max_tokens) for a in slow] == [(b.prompt, b.max_tokens) for b in fast]
    other = schedule_requests(
        config.model_copy(update={"output_lengths": LengthDistribution("fixed", (9,)), "length_pairs": ()}),
        IDS,
    )
    if not config.length_pairs:
        assert [one.prompt for one in other] == [one.prompt for one in slow]


@given(CONFIGS)
def test_schedule_prompts_have_prefix_and_drawn_length(config: LoadConfig) -> None:
    found = schedule_requests(config, IDS)
    heads = {one.prompt[: config.prefix_tokens] for one in found}
    assert len(heads) <= config.n_prefixes
    assert all(len(one.prompt) > config.prefix_tokens for one in found)
    if config.length_pairs:
        assert {(len(one.prompt) - config.prefix_tokens, one.max_tokens) for one in found} <= set(
            config.length_pairs
        )


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrival_gaps_match_rate_and_burstiness(burstiness: float) -> None:
    times = arrival_times(LoadConfig(requests=20_001, rate=5.0, burstiness=burstiness))
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = statistics.fmean(gaps)
    assert mean == pytest.approx(0.2, rel=0.06)
    assert statistics.stdev(gaps) / mean == pytest.approx(burstiness**-0.5, rel=0.06)


def test_load_config_requires_rate_or_concurrency() -> None:
    assert set(arrival_times(LoadConfig(requests=5, rate=float("inf")))) == {0.0}
    assert set(arrival_times(LoadConfig(requests=5, concurrency=2))) == {0.0}
    for wrong in ({}, {"rate": 1.0, "concurrency": 1}, {"rate": 0.0}, {"concurrency": 0}):
        with pytest.raises(ValidationError):
            LoadConfig(**wrong)  # type: ignore[arg-type]


def test_parse_lengths_draws_the_distribution() -> None:
    rng = numpy_rng(0, "test")
    assert parse_lengths("128").draw(rng, 3) == [128, 128, 128]
    uniform = parse_lengths("uniform:3,5").draw(rng, 300)
    assert set(uniform) == {3, 4, 5}
    logs = parse_lengths("lognormal:100,0.5,400").draw(rng, 4000)
    assert statistics.median(logs) == pytest.approx(100, rel=0.1) and max(logs) == 400 and min(logs) >= 1
    assert parse_lengths("lognormal:1,3").draw(rng, 50)[0] >= 1


@given(st.text(max_size=20))
def test_parse_lengths_error_names_the_field(text: str) -> None:
    try:
        found = parse_lengths(text, "--input")
    except ConfigError as error:
        assert "--input" in str(error)
    else:
        assert min(found.draw(numpy_rng(0), 20)) >= 1


@pytest.mark.parametrize(
    "text", ["0", "-1", "1.5", "uniform:5,3", "uniform:5", "lognormal:9", "nan", "inf", "fixed:1e99", "x:1"]
)
def test_parse_lengths_rejects_impossible_values(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(text)


def test_prompt_pool_cuts_and_wraps_around() -> None:
    assert PromptPool("abcdef").cut(4, 2) == "efabcdef"
    assert PromptPool((1, 2, 3)).cut(5, 4) == (3, 1, 2, 3)
    with pytest.raises(ConfigError):
        schedule_requests(LoadConfig(rate=1.0), PromptPool(""))


def test_read_prompts_supports_all_formats(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"prompt": "a", "max_tokens": 7}\n\n{"question": "What is 2 + 2?", "answer": "4"}\n'
        '{"conversations": [{"from": "human", "value": "hi"},'
        ' {"from": "gpt", "value": "y"}, {"from": "human", "value": ""}]}\n'
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n'
    )
    assert read_prompts(file) == [
        ("a", 7),
        ("What is 2 + 2?", None),
        ((("user", "hi"),), None),
        ((("system", "s"), ("user", "u")), None),
    ]
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    prompts = read_prompts(lines)
    found = schedule_requests(
        LoadConfig(requests=5, rate=1.0, output_lengths=LengthDistribution("fixed", (3,))), prompts
    )
    assert [one.max_tokens for one in found] == [3] * 5
    assert sorted(str(one.prompt) for one in found[:2]) == [
        "one",
        "two",
    ]  # each prompt once before any repetition


@pytest.mark.parametrize(
    "line", ["{", "[1]", "{}", '{"prompt": 3}', '{"prompt": "a", "max_tokens": 0}', '{"messages": [3]}']
)
def test_read_prompts_error_names_the_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_prompts(file)


def test_read_length_pairs_formats_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "l.csv"
    for text in (
        "prompt,output\n12,30\n5 6\n",
        '{"prompt_tokens": 12, "output_tokens": 30}\n{"prompt_tokens": 5, "output_tokens": 6}',
    ):
        file.write_text(text)
        assert read_length_pairs(file) == ((12, 30), (5, 6))
    wrong: Any
    for wrong in ("1,2\n3\n", "1,2\n3,0\n", "1,2\nx,1\n", '1,2\n{"prompt_tokens": 1}\n'):
        file.write_text(wrong)
        with pytest.raises(DataError, match="line 2"):
            read_length_pairs(file)
    file.write_text("a,b\n")
    with pytest.raises(DataError, match="contains no lengths"):
        read_length_pairs(file)
    with pytest.raises(DataError):
        read_length_pairs(tmp_path / "none")
