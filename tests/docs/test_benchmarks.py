"""Results of the benches: columns by kind of machine, the cells of the page, and falls since the last quick run."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from bench import _guard, _run, report, run_all

from whorl.store import Build, Store

RATES = {"float32": 1e11, "bfloat16": 4e11, "copy": 1e10}


def record(ours: float = 100.0, unit: str = "tokens/s", slower: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A quick record with a ratio of 2 over a bar of 1, on a machine `slower` times as slow in bf16."""
    rates = {**RATES, "bfloat16": RATES["bfloat16"] / slower}
    made = {"id": "a/b", "script": "bench/a/b.py", "claim": "c", "ours": ours, "peer": 50.0, "unit": unit}
    return {**made, "ratio": 2.0, "bar": 1.0, "ok": True, "date": "2026-11-24", "rates": rates, **fields}


@pytest.mark.parametrize(
    ("last", "now", "lines"),
    [
        (record(), record(96.0), 0),
        (record(), record(90.0), 1),
        (record(), record(50.0, slower=2.0), 0),  # the machine is slower
        (record(), record(45.0, slower=2.0), 1),
        (record(unit="ms"), record(110.0, unit="ms"), 1),
        (record(unit="ms"), record(90.0, unit="ms"), 0),
        (record(unit="accuracy"), record(50.0, unit="accuracy"), 0),  # no speed: its ratio counts
        (record(), record(ratio=1.8), 1),
        (record(), record(ratio=2.5), 0),
        (record(ratio=0.5), record(ratio=0.6), 1),  # lower is better: ok below the bar
        (record(ratio=0.5), record(ratio=0.4), 0),
        (
            record(ratio=0.5, ok=False),
            record(ratio=0.4, ok=False),
            1,
        ),  # higher is better, and the bar is missed
        (record(unit="ms"), record(1000.0), 0),  # another unit
        (record(id="other"), record(10.0), 0),
    ],
)
def test_falls_are_normalized(last: dict[str, Any], now: dict[str, Any], lines: int) -> None:
    assert len(_guard.falls({last["id"]: last}, [now])) == lines


@pytest.mark.parametrize(
    ("machine", "column"),
    [
        ({"cpu": "Intel(R) Xeon(R) Processor family 6 model 167"}, "AMX"),  # a record without a kind
        ({"cpu": "Intel(R) Xeon(R) family 6 model 106", "kind": "intel-6-106"}, "intel-6-106"),
        ({"cpu": "Intel(R) Xeon(R) family 6 model 143", "kind": "intel-6-143-amx"}, "AMX"),
        ({"cpu": "AMD EPYC family 26 model 2"}, "Zen 5"),
        ({"cpu": "AMD EPYC family 25 model 17", "kind": "amd-25-17"}, "Zen 4"),
        ({"cpu": "AMD EPYC family 25 model 1", "kind": "amd-25-1"}, "Zen 3"),
        ({"cpu": "X", "kind": "nvidia-h100", "gpu": "NVIDIA H100"}, "GPU"),
        (None, "Zen 5"),
    ],
)
def test_column_of_a_machine(machine: dict[str, str] | None, column: str) -> None:
    assert _run.column_of(machine) == column


def test_page_has_a_column_for_each_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zen4, amx = {"cpu": "AMD EPYC family 25 model 17"}, {"cpu": "Intel X", "kind": "intel-6-143-amx"}
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(_run, "RESULTS", tmp_path)
    (tmp_path / "transcribed.jsonl").write_text(json.dumps(record(ratio=3.0)) + "\n")
    for ratio, machine in ((1.5, zen4), (1.6, zen4), (4.0, amx)):  # the second one replaces the first
        _run._save({**record(ratio=ratio, ok=ratio > 2), "machine": machine})
    shortened = record(ratio=9.0, claim="c in short", unit="s", quick=True)
    quick = {"a/b": {**shortened, "machine": amx}, "a/new": {**record(id="a/new"), "machine": amx}}
    _guard.write_quick(tmp_path / "quick" / "k.jsonl", quick)
    assert _guard.read_quick(tmp_path / "quick" / "k.jsonl") == quick
    row = next(line for line in report.page(report.load_results()).splitlines() if line.startswith("| c "))
    cells = [text.strip() for text in row.split("|")[4:8]]
    assert cells == [
        "100 / 50: **4**, 2026-11-24", "100 / 50: **3**, transcribed",
        "100 / 50: **1.6** (missed), 2026-11-24", "-",
    ]  # fmt: skip
    assert "a/new" not in str(report.load_results())  # quick figures fill cells only
    (tmp_path / "a.jsonl").unlink()
    row = next(line for line in report.page(report.load_results()).splitlines() if line.startswith("| c "))
    assert (
        "| 100 / 50 s: **9**, quick |" in row and "| tokens/s |" in row
    )  # the name and unit of the full figure


@pytest.mark.parametrize(
    ("body", "result", "reason"),
    [
        (f"print({json.dumps(json.dumps({**record(), 'machine': {}, 'samples': []}))})", "passed", ""),
        (f"print({json.dumps(json.dumps(record()))})", "failed", "no field 'machine'"),
        ("import sys; print('no peer'); sys.exit(77)", "skipped", "no peer"),
        ("raise ValueError('broken')", "failed", "broken"),
        ("print('text')", "failed", "no JSON record"),
        ("import time; time.sleep(60)", "failed", "no result after"),
    ],
)
def test_outcome_of_a_script(body: str, result: str, reason: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(body)
    outcome = run_all.run(script, [], timeout=0.5 if "sleep" in body else 30)
    assert (
        outcome.result == result and reason in outcome.reason and len(outcome.records) == (result == "passed")
    )


def test_quick_run_keeps_records_and_prints_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    for name, option in (("a", ""), ("b", "'--quick'")):
        made = {**record(50.0), "id": name, "machine": {}, "samples": [], "script": f"bench/{name}.py"}
        line = json.dumps(json.dumps(made))
        text = f"import sys\nassert ('--quick' in sys.argv) == bool({option!r})\nprint({line})\n"
        (folder / f"{name}.py").write_text(text.replace("'--quick' in", '"--quick" in') if option else text)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)
    monkeypatch.setattr(_guard, "RESULTS", tmp_path)
    monkeypatch.setattr(_guard, "current_rates", lambda: RATES)
    monkeypatch.setattr(_guard, "kind_of_machine", lambda: "k")
    (folder / "c.py").write_text("raise SystemExit(77)")  # has no figure
    _guard.write_quick(
        tmp_path / "quick" / "k.jsonl",
        {
            "b": {**record(quick=True), "id": "b", "script": "bench/b.py", "date": "2026-11-01"},
            "a": {**record(), "id": "a", "script": "bench/a.py", "date": "2026-11-02"},
        },
    )
    given = [folder / name for name in ("a.py", "b.py", "c.py")]
    assert run_all.run_quick(given, limit=30) == {"passed": 2, "skipped": 1}
    printed = capsys.readouterr().out
    assert printed.index("bench/c.py") < printed.index("bench/b.py") < printed.index("bench/a.py")
    assert "fell: b: 50 after 100 tokens/s, -50%" in printed
    kept = _guard.read_quick(tmp_path / "quick" / "k.jsonl")["b"]
    assert kept["ours"] == 50.0 and kept["rates"] == RATES and kept["quick"]
    assert run_all.run_quick([folder / "a.py"], limit=30, total=0.5) == {"not run": 1}
    assert "not run, the time is over: bench/a.py" in capsys.readouterr().out


@pytest.mark.parametrize("peer", ["vllm", "vllm=", "vllm=/no/python", f"vlm={sys.executable}"])
def test_a_wrong_peer_is_refused_before_any_bench(
    peer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_all.py", "--quick", "--peer", peer])
    monkeypatch.setattr(run_all, "run_quick", pytest.fail)
    with pytest.raises(SystemExit, match="2"):
        run_all.main()
    assert f"--peer {peer}: expected NAME=PYTHON, NAME one of vllm, " in capsys.readouterr().err


def test_scripts_with_a_quick_form_are_found() -> None:
    assert len(run_all.scripts()) > 60
    assert sum(map(run_all.has_quick_form, run_all.scripts())) > 50
    assert sum(map(run_all.needs_store, run_all.scripts())) == 14


@pytest.mark.parametrize("variable", ["WHORL_HOME", _run.STORE])
def test_quick_run_makes_a_model_where_none_is(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(run_all, "execute", lambda command, timeout: ran.append(command) or (0, "", ""))
    for name in ("WHORL_HOME", _run.STORE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(run_all, "ROOT", tmp_path)  # relative stores are the scripts'
    monkeypatch.setenv(variable, "store")
    with run_all.quickstart(30):
        made = os.environ[_run.STORE]
    assert ran[0][-1] == made and not Path(made).exists()
    assert os.environ.get(_run.STORE) == ("store" if variable == _run.STORE else None)
    with Build(
        Store(tmp_path / "store"), kind="model", name=_run.PRETRAINED, parents={}, config={}, version=1
    ) as build:
        (build.path / "model").touch()
    with run_all.quickstart(30):
        assert os.environ[variable] == "store"
    assert len(ran) == 1


def test_script_without_store_or_data_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(_run.STORE, str(tmp_path))
    monkeypatch.setenv(_run.DATA, str(tmp_path))
    for look in (lambda: _run.quickstart_store(None), lambda: _run.data_path("bbh", "https://a.b")):
        with pytest.raises(SystemExit) as ended:
            look()
        assert ended.value.code == _run.SKIPPED
    store, data = capsys.readouterr().out.splitlines()
    assert "no quickstart/pretrain" in store and "`whorl run quickstart`" in store
    assert str(tmp_path / "bbh") in data and "https://a.b" in data and "WHORL_DATA" in data
