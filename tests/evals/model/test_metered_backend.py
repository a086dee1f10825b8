"""Costs of the requests that reach a model: time, tokens, memory, energy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.evals.backend import FakeBackend

from whorl.evals.model.metered_backend import MeteredBackend, energy_counters
from whorl.evals.model.requests import Completion, GenerateRequest, Missing, Request, Response
from whorl.evals.model.response_cache import CachedBackend, ResponseCache


def package(root: Path, name: str, value: int, most: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "energy_uj").write_text(f"{value}\n")
    (folder / "max_energy_range_uj").write_text(f"{most - 1}\n")
    return folder / "energy_uj"


def test_costs_are_those_of_requests_that_were_sent(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", 999_000)
    package(tmp_path, "intel-rapl:0:0", 5)  # a part of the package

    def answer(request: Request) -> Response:
        counter.write_text("2000")  # the counter wraps
        assert isinstance(request, GenerateRequest)
        return Missing("no") if request.prompt == "fail" else Completion("a b", ids=(1, 2))

    metered = MeteredBackend(FakeBackend(answer), powercap=tmp_path)
    assert metered.cost() == {}
    with ResponseCache(tmp_path / "responses.sqlite") as cache:
        backend = CachedBackend(metered, cache)
        for _ in range(2):
            backend.respond([GenerateRequest("x"), GenerateRequest("y")], lambda n, response: None)
    cost = metered.cost()
    assert metered.n_tokens == 4 and cost["joules"] == pytest.approx(0.003)
    assert cost["tokens_per_second"] == pytest.approx(4 / cost["seconds"]) and cost["memory_bytes"] > 1e6
    metered.respond([GenerateRequest("fail")], lambda n, response: None)
    assert metered.n_tokens == 4


def test_endpoints_and_lost_counters_have_no_energy(tmp_path: Path) -> None:
    counter = package(tmp_path, "intel-rapl:0", 1)
    answer = FakeBackend(lambda request: Completion("a"))
    metered = MeteredBackend(answer, local=False, powercap=tmp_path)
    metered.respond([GenerateRequest("x")], lambda n, response: None)
    assert set(metered.cost()) == {"seconds"}  # no ids, so no tokens
    assert metered.no_energy == "the model runs elsewhere"
    lost = MeteredBackend(answer, powercap=tmp_path)
    assert not lost.no_energy
    counter.unlink()
    lost.respond([GenerateRequest("x")], lambda n, response: None)
    assert "joules" not in lost.cost() and "cannot be read any more" in lost.no_energy


def test_energy_of_a_part_of_the_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert energy_counters(tmp_path / "none") == ([], f"no counters (RAPL) in {tmp_path / 'none'}")
    package(tmp_path, "intel-rapl:0", 1)
    platform = package(tmp_path, "intel-rapl:1", 7)  # it includes the package
    (platform.parent / "name").write_text("psys\n")
    counters, reason = energy_counters(tmp_path)
    assert [each.read() for each in counters] == [1] and not reason
    second = package(tmp_path, "intel-rapl:2", 1)
    second.write_text("")
    assert energy_counters(tmp_path) == ([], f"{second} cannot be read; Linux permits it to root")
    (second.parent / "max_energy_range_uj").unlink()
    assert energy_counters(tmp_path) == ([], f"{second.parent} has no readable counter")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert energy_counters(tmp_path) == ([], "the energy of the GPU is not counted")
