"""Run folders, metrics, random streams and progress."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from whorl.errors import ConfigError, without_credentials
from whorl.tracking import seeds
from whorl.tracking.progress import Progress, format_duration
from whorl.tracking.run import SETTINGS, Run, environment, event_record, read_metrics

# Seeds


def test_derive_is_fixed_and_distinct() -> None:
    assert seeds.derive(0, "init") == 6291500876198751163
    names = [(0, "init"), (1, "init"), (0, "data"), (0, "init", 1), (0, "init", "1"), (0, "in", "it")]
    assert len({seeds.derive(*each) for each in names}) == len(names)


@given(st.integers(), st.lists(st.text() | st.integers(), max_size=3))
def test_derive_fits_every_generator(seed: int, names: list[str | int]) -> None:
    assert 0 <= seeds.derive(seed, *names) < 2**63


def test_generators_repeat_and_keep_global_state() -> None:
    before = torch.get_rng_state()
    a, b = (torch.randn(4, generator=seeds.generator(7, "x")) for _ in range(2))
    assert torch.equal(a, b) and torch.equal(torch.get_rng_state(), before)
    assert seeds.numpy_rng(7, "x").integers(1 << 40) == seeds.numpy_rng(7, "x").integers(1 << 40)


def test_reseedable_rng_has_no_memory() -> None:
    many = seeds.ReseedableRNG()
    first = many(1).random(5).tolist(), many(2).normal(size=3).tolist(), many(1).integers(9, size=3).tolist()
    many(7).integers(1 << 20, dtype="int32")  # leaves half a word in the generator's buffer
    assert first[0] == many(1).random(5).tolist() and first[1] == many(2).normal(size=3).tolist()
    assert first[2] == seeds.ReseedableRNG()(1).integers(9, size=3).tolist()
    means = [many(seed).random(64).mean() for seed in range(2000)]
    assert abs(np.mean(means) - 0.5) < 0.004 and abs(np.std(means) * 8 * 12**0.5 - 1) < 0.1
    assert len({many(seed).integers(1 << 60) for seed in range(2000)}) == 2000


# Metrics and the run folder


def test_metrics_resume_drops_later_records(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", config={"name": "r"}, tensorboard=False)
    with run.metrics("pretrain") as log:
        for step in range(5):
            log.write(step, {"loss": 5.0 - step})
    with log.path.open("a") as file:
        file.write('{"step": 5, "lo')  # cut off by a kill
    with run.metrics("other") as other:
        other.write(9, {"x": 1.0})
    with run.metrics("pretrain", resume_at=3) as log:
        log.write(3, {"loss": 0.5, "note": "again"})
    records = list(run.read_metrics("pretrain"))
    assert [(r["step"], r["loss"]) for r in records] == [(0, 5.0), (1, 4.0), (2, 3.0), (3, 0.5)]
    assert all(record["step_name"] == "pretrain" and record["time"] > 0 for record in records)
    assert len(list(run.read_metrics())) == 5
    assert json.loads((run.dir / "config.json").read_text()) == {"name": "r"}


def test_event_becomes_a_record(tmp_path: Path) -> None:
    event = {
        "kind": "overfitting",
        "message": "rises",
        "action": "none",
        "step": 3,
    }  # the trainer adds the step
    with Run(tmp_path, tensorboard=False).metrics("s") as log:
        log.write(3, event_record(event))
    (record,) = read_metrics(log.path)
    assert (record["step"], record["event"], record["message"]) == (3, "overfitting", "rises")


def test_metrics_fresh_start_drops_all(tmp_path: Path) -> None:
    run = Run(tmp_path, tensorboard=False)
    for _ in range(2):
        with run.metrics("s") as log:
            log.write(1, {"x": 1.0})
    assert len(read_metrics(log.path)) == 1


def test_tensorboard_reads_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run(tmp_path).metrics("pretrain") as log:
        log.write(1, {"loss": 2.5, "sample": "def f"})
    events = EventAccumulator(str(tmp_path / "tb" / "pretrain"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5)]


def test_environment_and_log_are_written(tmp_path: Path) -> None:
    run = Run(tmp_path)
    found = run.record_environment()
    assert found["cpu"] and found["versions"]["torch"].startswith("2.")
    assert json.loads((tmp_path / "environment.json").read_text()) == found
    run.log("one\ntwo")
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split("  ", 1)[1] for line in lines] == ["one", "two"]


# Progress


def test_progress_plain_lines_and_closing_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interactive=False, every=1000)
    heard: list[str] = []
    progress.sinks.append(heard.append)
    with progress.task("Reading", total=100, unit="MB") as task:
        for _ in range(100):
            task.advance(note="fine")
    assert re.fullmatch(r"Reading: 100 of 100 MB, \d\.\d s, fine\n", stream.getvalue())
    assert heard == stream.getvalue().splitlines()


def test_progress_plain_lines_for_long_tasks() -> None:
    stream = io.StringIO()
    with Progress(stream, interactive=False, every=0).task("Reading", total=4) as task:
        task.advance()
        task._start, task._said = task._start - 30, task._said - 30
        task.advance()
        task.advance(2)
    first, second, last = stream.getvalue().splitlines()  # the line of the end is not repeated
    assert first.startswith("Reading: 1 of 4 (25 %), 0.0 s") and "left" not in first
    assert second == "Reading: 2 of 4 (50 %), 30 s, about 30 s left" and last == "Reading: 4 of 4, 30 s"


def test_progress_last_line_has_the_final_count() -> None:
    """Of work that counts nothing, all of it; of work that ends early, what was done, and no time that is left."""
    stream = io.StringIO()
    progress = Progress(stream, interactive=False, every=1000)
    with progress.task("Sorting", total=3, unit="files"):
        pass
    with progress.task("Training", total=10, unit="steps") as task:
        task.advance(6)
        task._start -= 60
    with progress.task("Evaluating", total=4, unit="episodes") as task:
        task.update(done=0)
    with pytest.raises(ZeroDivisionError), progress.task("Reading", total=3, unit="files"):
        raise ZeroDivisionError
    assert stream.getvalue().splitlines() == [
        "Sorting: 3 of 3 files, 0.0 s", "Training: 6 of 10 steps (60 %), 1 min 00 s",
        "Evaluating: 0 of 4 episodes (0 %), 0.0 s", "Reading: 0 of 3 files (0 %), 0.0 s (stopped)",
    ]  # fmt: skip


def test_progress_failed_task_and_silent() -> None:
    stream, silent = io.StringIO(), Progress.silent()
    with pytest.raises(ZeroDivisionError), Progress(stream, interactive=False).task("Reading"):
        raise ZeroDivisionError
    assert "(stopped)" in stream.getvalue()
    silent.stream = io.StringIO()
    with silent.task("x") as task:
        task.update(done=3, note="n")
    silent.log("y")
    assert silent.stream.getvalue() == ""


def test_progress_terminal_bar_and_closing_line() -> None:
    stream = io.StringIO()
    progress = Progress(stream, interactive=True)
    with progress.task("Reading [bold]", total=2, unit="MB") as task:
        task.advance(2)
        progress.log("between")
    lines = stream.getvalue().splitlines()
    assert "between" in lines and re.search(r"Reading \[bold\]: 2 of 2 MB, \d+\.\d s$", lines[-1])


@pytest.mark.parametrize(("width", "line"), [(30, "Training: 12 of 99 steps (12 …"), (120, "Training ━━━")])
def test_progress_fits_the_width_of_the_terminal(
    width: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = io.StringIO()
    progress = Progress(stream, interactive=True)
    with progress.task("Training", total=99, unit="steps") as task:
        task.update(done=12, note="loss 4.123, 12,345 tokens/s, held-out 1.2")
        assert progress._live is not None
        progress._live.console.print(progress._live.get_renderable())
    drawn = stream.getvalue().splitlines()[0]
    assert drawn.startswith(line) and len(drawn.rstrip()) <= width


DURATIONS = [(0.42, "0.4 s"), (12.3, "12 s"), (59.9, "1 min 00 s"), (200, "3 min 20 s"), (3900, "1 h 05 min")]


@pytest.mark.parametrize(("seconds", "text"), DURATIONS)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_log_shows_control_characters_as_escapes() -> None:
    stream, kept = io.StringIO(), list[str]()
    progress = Progress(stream, interactive=False)
    progress.sinks.append(kept.append)
    progress.log("a\x1b[31mred\x9b\x00\tb\r\nnächste Zeile 日本")
    assert stream.getvalue() == "a\\x1b[31mred\\x9b\\x00\tb\\r\nnächste Zeile 日本\n"
    assert kept == ["a\\x1b[31mred\\x9b\\x00\tb\\r\nnächste Zeile 日本"]


# Secrets

NO_SETTINGS = {
    "WHORL_API_KEY", "WHORL_ATTEMPT", "WHORL_CATALOG", "WHORL_ENDPOINT_KEY", "WHORL_HOME", "WHORL_LAUNCHER",
    "WHORL_LIMITS_FOLDER", "WHORL_LOG",
}  # fmt: skip


def test_environment_records_listed_settings_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_API_KEY", "wk-hunter2")
    monkeypatch.setenv("WHORL_CATALOG", "postgresql://me:hunter2@host/documents")
    monkeypatch.setenv("WHORL_DTYPE", "float32")
    found = environment()
    assert found["settings"]["WHORL_DTYPE"] == "float32" and "hunter2" not in json.dumps(found)
    source = Path(seeds.__file__).parents[1]
    used = {name for f in source.rglob("*.py") for name in re.findall(r'"(WHORL_[A-Z_]+)"', f.read_text())}
    assert used == NO_SETTINGS | set(SETTINGS)  # a new variable goes to one of the lists


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("cannot open 'https://me:hunter2@host/a'", "cannot open 'https://***@host/a'"),
        ("https://hunter2@host/a, b@c", "https://***@host/a, b@c"),
        ("zip://*.csv::s3://AKIA:hunter2@bucket/a", "zip://*.csv::s3://***@bucket/a"),
        ("https://host/a?b=1&sig=hunter2&c=2", "https://host/a?b=1&sig=***&c=2"),
        ("https://host/a?X-Amz-Security-Token=hunter2", "https://host/a?X-Amz-Security-Token=***"),
        ("https://host/v1?api-key=hunter2 failed", "https://host/v1?api-key=*** failed"),
        ("postgresql://me@host/a and me@host", "postgresql://me@host/a and me@host"),
        ("kafka://host:1?sasl.password=hunter2&x=1", "kafka://host:1?sasl.password=***&x=1"),
        ("a?token=hunter2 without a URL", "a?token=hunter2 without a URL"),
    ],
)
def test_credentials_of_urls_leave_errors_and_logs(tmp_path: Path, text: str, clean: str) -> None:
    assert without_credentials(text) == clean
    error = ConfigError("a source is wrong", expected=text, do=text)
    assert str(error).count(clean) == 2 and error.expected == clean
    run = Run(tmp_path, tensorboard=False)
    run.log(text)
    assert (tmp_path / "log.txt").read_text().endswith(f"  {clean}\n")
