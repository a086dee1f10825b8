"""The load generator against a live server: token counts and errors."""

from __future__ import annotations

from typing import Any

from tests.support.serve.live_server import Running

from whorl.loadtest.runs import LoadTest, run_load_test_sync
from whorl.loadtest.summary import LatencySLO
from whorl.loadtest.workload import LengthDistribution, LoadConfig

TEXT = "def add(a, b):\n    return a + b\n" * 60


def test_load_test_counts_every_token(server: Running) -> None:
    prompts, outputs = LengthDistribution("uniform", (5, 20)), LengthDistribution("fixed", (6,))
    lengths: Any = {"prompt_lengths": prompts, "output_lengths": outputs, "prefix_tokens": 16}
    load = LoadConfig(requests=8, rate=200.0, **lengths)
    options: Any = {"extra_fields": (("ignore_eos", True),), "slo": LatencySLO(ttft=600.0)}
    (found,) = run_load_test_sync(LoadTest(server.url, TEXT, [load], **options))
    assert found.summary.errors == {} and found.summary.slo_attainment == 1.0
    assert found.summary.output_tokens == 48
    assert all(21 <= record.prompt_tokens <= 36 for record in found.records)
    assert all(record.finish_reason == "length" for record in found.records)


def test_load_test_chat_and_rejected_requests(server: Running) -> None:
    fine = LoadConfig(requests=3, concurrency=2, output_lengths=LengthDistribution("fixed", (4,)))
    (found,) = run_load_test_sync(LoadTest(server.url, [("add two numbers", None)], [fine], endpoint="chat"))
    assert found.summary.finished == 3 and found.summary.prompt_tokens > 0
    options: Any = {"extra_fields": (("temperature", -1),), "warmup_requests": 0}
    (rejected,) = run_load_test_sync(LoadTest(server.url, [("x", None)], [fine], **options))
    assert rejected.summary.errors == {"http 400": 3} and "temperature" in rejected.records[0].error_message
