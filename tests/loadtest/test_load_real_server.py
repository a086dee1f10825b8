"""The load client against our own server: what one counts is what the other says."""

from __future__ import annotations

from conftest import Running

from whorl.loadtest.runs import Trial, run_now
from whorl.loadtest.summary import Promise
from whorl.loadtest.workload import Lengths, LoadConfig

TEXT = "def add(a, b):\n    return a + b\n" * 60


def test_ids_of_exact_length_go_in_and_every_token_is_counted(server: Running) -> None:
    load = LoadConfig(
        requests=8, rate=200.0, prompt_lengths=Lengths("uniform", (5, 20)), output_lengths=Lengths("fixed", (6,)),
        prefix_tokens=16,
    )  # fmt: skip
    trial = Trial(server.url, TEXT, [load], extra=(("ignore_eos", True),), promise=Promise(ttft=600.0))
    (found,) = run_now(trial)
    assert found.summary.errors == {} and found.summary.good == 1.0
    assert found.summary.output_tokens == 48
    assert all(21 <= record.prompt_tokens <= 36 for record in found.records)
    assert all(record.finish == "length" for record in found.records)


def test_a_conversation_streams_and_a_refusal_is_counted_with_its_words(server: Running) -> None:
    fine = LoadConfig(requests=3, concurrency=2, output_lengths=Lengths("fixed", (4,)))
    (found,) = run_now(Trial(server.url, [("add two numbers", None)], [fine], endpoint="chat"))
    assert found.summary.finished == 3 and found.summary.prompt_tokens > 0
    (refused,) = run_now(Trial(server.url, [("x", None)], [fine], extra=(("temperature", -1),), warm_up=0))
    assert refused.summary.errors == {"http 400": 3} and "temperature" in refused.records[0].said
