"""The schedule of a load: a pure function of configuration and seed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from whorl.errors import ConfigError, DataError
from whorl.loadtest.workload import (
    LengthDistribution,
    LoadConfig,
    PromptPool,
    ScheduledRequest,
    arrival_times,
    parse_lengths,
    read_length_pairs,
    read_prompts,
    schedule_requests,
)
from whorl.tracking.seeds import numpy_rng

IDS = PromptPool(tuple(range(500)))
INTEGERS = {"requests": (1, 60), "seed": (0, 5), "prefix_tokens": (0, 40), "n_prefixes": (1, 3)}
FIELDS: Any = {name: st.integers(*bounds) for name, bounds in INTEGERS.items()}
FIELDS |= {"rate": st.floats(0.1, 100), "burstiness": st.floats(0.1, 10)}
CONFIGS = st.builds(LoadConfig, length_pairs=st.sampled_from([(), ((3, 4), (50, 6))]), **FIELDS)


def schedule(config: LoadConfig, **changes: Any) -> list[ScheduledRequest]:
    return schedule_requests(config.model_copy(update=changes), IDS)


@given(CONFIGS)
def test_schedule_is_pure_and_prefix_stable(config: LoadConfig) -> None:
    found = schedule_requests(config, IDS)
    assert found == schedule(config)
    assert [one.number for one in found] == list(range(config.requests))
    times = [one.send_time for one in found]
    assert times[0] == 0 and times == sorted(times)
    assert schedule(config, requests=config.requests + 17)[: config.requests] == found


@given(CONFIGS)
def test_schedule_rate_scales_times_only(config: LoadConfig) -> None:
    assert config.rate is not None
    slow, fast = schedule(config), schedule(config, rate=2 * config.rate)
    assert [a.send_time for a in slow] == pytest.approx([2 * b.send_time for b in fast])
    assert [(a.prompt, a.max_tokens) for a in slow] == [(b.prompt, b.max_tokens) for b in fast]
    other = schedule(config, output_lengths=LengthDistribution("fixed", (9,)), length_pairs=())
    if not config.length_pairs:
        assert [one.prompt for one in other] == [one.prompt for one in slow]


@given(CONFIGS)
def test_schedule_prompts_have_prefix_and_drawn_length(config: LoadConfig) -> None:
    found = schedule(config)
    assert len({one.prompt[: config.prefix_tokens] for one in found}) <= config.n_prefixes
    lengths = {(len(one.prompt) - config.prefix_tokens, one.max_tokens) for one in found}
    assert all(length > 0 for length, _ in lengths)
    if config.length_pairs:
        assert lengths <= set(config.length_pairs)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_arrival_gaps_match_rate_and_burstiness(burstiness: float) -> None:
    times = arrival_times(LoadConfig(requests=20_001, rate=5.0, burstiness=burstiness))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.06)


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


IMPOSSIBLE = ["0", "-1", "1.5", "nan", "inf", "uniform:5,3", "uniform:5", "lognormal:9", "fixed:1e99", "x:1"]


@pytest.mark.parametrize("text", IMPOSSIBLE)
def test_parse_lengths_rejects_impossible_values(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_lengths(text)


def test_prompt_pool_cuts_and_wraps_around() -> None:
    assert PromptPool("abcdef").cut(4, 2) == "efabcdef"
    assert PromptPool((1, 2, 3)).cut(5, 4) == (3, 1, 2, 3)
    with pytest.raises(ConfigError):
        schedule_requests(LoadConfig(rate=1.0), PromptPool(""))


CONVERSATION = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "y"}]
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def test_read_prompts_supports_all_formats(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    entries: list[dict[str, Any]] = [{"prompt": "a", "max_tokens": 7}, {"question": "2 + 2?", "answer": "4"}]
    entries += [{"conversations": [*CONVERSATION, {"from": "human", "value": ""}]}, {"messages": MESSAGES}]
    file.write_text("\n\n".join(map(json.dumps, entries)))
    talk, messages = (("user", "hi"),), (("system", "s"), ("user", "u"))
    assert read_prompts(file) == [("a", 7), ("2 + 2?", None), (talk, None), (messages, None)]
    lines = tmp_path / "p.txt"
    lines.write_text("one\n\ntwo\n")
    load = LoadConfig(requests=5, rate=1.0, output_lengths=LengthDistribution("fixed", (3,)))
    found = schedule_requests(load, read_prompts(lines))
    assert [one.max_tokens for one in found] == [3] * 5
    assert {one.prompt for one in found[:2]} == {"one", "two"}  # each prompt once before any repetition


BAD_LINES = ["{", "[1]", "{}", '{"prompt": 3}', '{"prompt": "a", "max_tokens": 0}', '{"messages": [3]}']


@pytest.mark.parametrize("line", BAD_LINES)
def test_read_prompts_error_names_the_line(line: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_prompts(file)


def test_read_length_pairs_formats_and_errors(tmp_path: Path) -> None:
    file = tmp_path / "l.csv"
    pairs = [{"prompt_tokens": 12, "output_tokens": 30}, {"prompt_tokens": 5, "output_tokens": 6}]
    for text in ("prompt,output\n12,30\n5 6\n", "\n".join(map(json.dumps, pairs))):
        file.write_text(text)
        assert read_length_pairs(file) == ((12, 30), (5, 6))
    for wrong in ("1,2\n3\n", "1,2\n3,0\n", "1,2\nx,1\n", '1,2\n{"prompt_tokens": 1}\n'):
        file.write_text(wrong)
        with pytest.raises(DataError, match="line 2"):
            read_length_pairs(file)
    file.write_text("a,b\n")
    with pytest.raises(DataError, match="contains no lengths"):
        read_length_pairs(file)
    with pytest.raises(DataError):
        read_length_pairs(tmp_path / "none")
