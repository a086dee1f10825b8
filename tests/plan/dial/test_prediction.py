"""The prediction of a plan: money, the line of the probe, serving, and a law far from its runs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from tests.plan.test_plan import MACHINE, fake_timing, plan  # noqa: F401

from whorl.corpus import Document
from whorl.errors import ConfigError
from whorl.machine.budget import Budget
from whorl.plan.accounting.devices import MFU, devices
from whorl.plan.accounting.model_cost import decoder_config, training_cost
from whorl.plan.config import PlanConfig, StudyConfig
from whorl.plan.dial import probe as probing
from whorl.plan.dial.prediction import predict
from whorl.plan.dial.price import in_compute
from whorl.plan.dial.probe import Probe, of_python, probe_steps
from whorl.plan.ladder import Candidate, seen_bytes
from whorl.plan.laws.law import bytes_per_token, effective_bytes, fitted_law
from whorl.tracking.progress import Progress


class FakeCorpus:
    """Texts that repeat a pattern, as `whorl.corpus.Corpus` gives them."""

    def __init__(self) -> None:
        texts = [f"def name_{n}(a, b):\n    return a + {n} * b\n" * 40 for n in range(60)]
        self.splits = {"train": texts[:50], "test": texts[50:]}

    def documents(self, split: str) -> list[Document]:
        texts = self.splits.get(split, [])
        return [
            Document(f"{n}", "", f"{n}.py", None, 0, text, len(text), None) for n, text in enumerate(texts)
        ]

    def bytes(self, split: str) -> int:
        return sum(document.n_bytes for document in self.documents(split))


def test_money_buys_flops_of_the_device() -> None:
    h100 = devices()["h100"]
    budget, (line,) = in_compute("3usd@h100x2", MACHINE)
    seconds = 3 / h100.price_per_hour * 3600  # two devices have half the hours
    assert budget.flops == pytest.approx(seconds * h100.peak("bf16") * MFU)
    assert "2 x NVIDIA H100" in line and "40% of its peak" in line
    assert in_compute("5m", MACHINE) == (Budget(seconds=300), [])
    own = replace(MACHINE, gpu="NVIDIA H100 80GB HBM3")
    assert in_compute("3usd@h100", own)[0].seconds == pytest.approx(seconds)
    assert in_compute("3usd@h100", own, deterministic=True)[0].flops == pytest.approx(budget.flops)
    with pytest.raises(ValueError, match="a study runs on this machine"):
        StudyConfig(budget="3usd@h100")


@pytest.mark.parametrize(
    ("text", "reason"), [("3usd@mi300x", "mi300x has no price"), ("3usd@h1000", "'h1000' is unknown")]
)
def test_money_needs_a_device_with_a_price(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        in_compute(text, MACHINE)
    with pytest.raises(ValueError, match=reason):  # before a step of the recipe runs
        PlanConfig(budget=text)


@pytest.mark.parametrize("text", ["3usd", "3m@h100", "0usd@h100", "3usd@"])
def test_bad_money_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"3usd@h100"):
        Budget.parse(text)


def test_probe_moves_a_prediction_along_its_line() -> None:
    probe = Probe(steps=(100, 300), bits_per_byte=(2.0, 1.5), reference=(1.8, 1.4))
    power = 0.75 + 0.25 * math.log(4 / 3) / math.log(9 / 7)
    assert probe.power == pytest.approx(power) and probe.correct(0.7) == pytest.approx(1.5 * 0.5**power)
    assert probe.model_copy(update={"bits_per_byte": (1.5, 1.6)}).power == 0.75
    plain = plan(budget="5m").expected
    made = plan(budget="5m", measure=lambda job, timing: probe if probe_steps(job, timing) else None)
    assert made.probe == probe
    for name in ("bits_per_byte", "bits_per_byte_x0.5", "bits_per_byte_x2"):
        assert made.expected[name] == pytest.approx(probe.correct(plain[name]))
    assert plain["bits_per_byte_x0.5"] > plain["bits_per_byte"] > plain["bits_per_byte_x2"]
    assert any("; probe, " in line for line in made.arithmetic)


def test_probe_takes_a_share_of_the_plan() -> None:
    made = plan(budget="1e14flops", deterministic=True)
    steps = probe_steps(made.job, None)
    assert probing.MIN_STEPS <= steps <= probing.STEPS
    flops = (
        steps * (1 + probing.FIRST) * probing.ROWS * probing.LENGTH * probing._token_flops(probing.MODEL, 256)
    )
    assert flops <= probing.SHARE * 1e14
    assert probe_steps(plan(budget="1e11flops", deterministic=True).job, None) == 0


def test_serving_makes_the_model_smaller() -> None:
    def size(served: float) -> float:
        return plan(budget="1e15flops", deterministic=True, vocab_size=1024, serve_tokens=served).expected[
            "matrix_parameters"
        ]

    assert size(1e12) < size(1e9) <= size(1.0)


def test_a_law_far_beyond_its_runs_warns_first() -> None:
    made = plan(steps=10**9, deterministic=True)
    assert made.arithmetic[0].startswith("warning: ") and "times beyond the runs" in made.arithmetic[0]
    assert made.expected["extrapolation"] > 1000
    assert plan(budget="5m").expected["extrapolation"] == 1


@pytest.mark.parametrize("slower", [0.5, 1.0, 2.0])
def test_more_of_a_budget_never_buys_less(slower: float) -> None:
    """Whatever the final timing of the chosen shape is, relative to that of the candidates, which may have more steps."""
    job, law = plan(budget="5m").job, fitted_law()
    own = Candidate(
        job.model,
        0.0,
        job.steps,
        0.0,
        training_cost(job.model, batch_size=1, seq_len=256, replicas=1).block_params,
    )
    small = decoder_config(96, 3, job.model.vocab_size)
    candidates = [own, Candidate(small, 0.0, 3 * job.steps, 0.0, 300_000)]
    slow = job.model_copy(update={"steps": int(job.steps / slower)})
    figures = predict(slow, 10**9, law, None, candidates).figures
    assert figures["bits_per_byte_x0.5"] > figures["bits_per_byte_x2"]
    losses = [
        min(law.loss(c.block_params, c.steps / slower * part * 2048 * bytes_per_token(c.model.vocab_size),
                     c.model.vocab_size) for c in candidates)
        for part in (0.5, 2.0)
    ]  # fmt: skip
    expected = [
        loss * of_python("over_law", slow.steps * part) for loss, part in zip(losses, (0.5, 2), strict=True)
    ]
    assert [figures["bits_per_byte_x0.5"], figures["bits_per_byte_x2"]] == pytest.approx(expected, rel=1e-3)


def test_seen_bytes_is_the_inverse_of_effective_bytes() -> None:
    for seen in (3.0, 10.0, 200.0):
        assert seen_bytes(effective_bytes(seen, 10), 10) == pytest.approx(seen)
    assert seen_bytes(1000.0, 10) == float("inf")


def test_probe_trains_on_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, job = FakeCorpus(), plan(budget="1e13flops", deterministic=True, replicas=1).job
    monkeypatch.setattr(probing, "probe_steps", lambda *_: 6)
    found = probing.run_probe(job, None, corpus, Progress.silent())  # type: ignore[arg-type]
    assert found is not None and found.steps == (2, 6)
    assert found.bits_per_byte[1] < found.bits_per_byte[0] < 9
    assert found.power == 1  # no reference before its first run
    corpus.splits.pop("test")
    assert probing.run_probe(job, None, corpus, Progress.silent()) is None  # type: ignore[arg-type]
