"""`whorl profile`; output of `whorl run` to a terminal, a pipe and a metrics logger."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import re
import struct
import sys
import termios
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.support.cli import refuse, start_whorl, succeed, weights
from tests.support.notes import TRAINING_RECIPE, write_notes

BRAILLE = re.compile("[\u2801-\u28ff]")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus and a recipe; the steps before training are made."""
    folder = write_notes(tmp_path_factory.mktemp("home"), recipe=TRAINING_RECIPE)
    succeed(folder, "run", "tiny.toml", "--until", "tokens")
    return folder


def test_profile_prints_json_only(home: Path) -> None:
    done = succeed(home, "profile", "tiny.toml", "--steps", 2, "--json", "--trace", "t.json.gz")
    figures = json.loads(done.stdout)
    assert figures["steps"] == 2 and not figures["compiled"] and figures["step_seconds"] > 0
    assert figures["phases"]["optimizer"] > 0 and max(op["share_of_peak"] for op in figures["operations"]) > 0
    assert "tokens: looked up" in done.stderr
    with gzip.open(home / "t.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_profile_prints_tables_and_trace(home: Path) -> None:
    printed = succeed(home, "profile", "tiny.toml", "--steps", 2, "--eager").stdout
    parts = (
        "A step takes", "Phases: data ", "aten::mm", "whorl: optimizer", "of peak", "others",
        "ui.perfetto.dev",
    )  # fmt: skip
    assert not [part for part in parts if part not in printed], printed
    (trace,) = re.findall(r"trace: (\S+)", printed)
    assert Path(trace).exists()
    refuse(home, "show", "model", code=1)  # no model is kept


def test_profile_refuses_recipe_without_training(home: Path) -> None:
    (home / "none.toml").write_text('name = "none"\n[steps.ingest]\nsources = ["notes"]\n')
    assert "no pretraining steps" in refuse(home, "profile", "none.toml")
    assert "pretrain" in refuse(home, "profile", "tiny.toml", "--step", "tokens")


def test_unknown_logger_is_refused_before_work(home: Path) -> None:
    assert "wandb" in refuse(home, "run", "tiny.toml", "--log", "tensorboad", "--store", "elsewhere")
    assert not (home / "elsewhere").exists()


def run_on_terminal(*words: object, cwd: Path) -> str:
    """Run `whorl` in a new process whose standard streams are a terminal of 30 x 100; return what it prints."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    unset = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    process = start_whorl(*words, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=environment)
    os.close(slave)
    output = b""
    try:
        while part := os.read(master, 65536):
            output += part
    except OSError:  # the process has closed the terminal
        pass
    os.close(master)
    assert process.wait(timeout=60) == 0, output.decode(errors="replace")
    return output.decode(errors="replace")


def test_dashboard_is_shown_on_terminal_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("run", "tiny.toml", "--set", "pretrain.run.checkpoint_seconds=60")
    text = run_on_terminal(*command, cwd=home)
    for expected in ("pretrain, step", "validation", "MFU", "Training: 20 of 20 steps"):
        assert expected in text, expected
    assert BRAILLE.search(text)
    assert not BRAILLE.search(text[text.rindex("Training: 20 of 20") :])

    wandb = MagicMock(__spec__=ModuleSpec("wandb", None))
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    printed = succeed(home, *command, "--store", "piped", "--log", "wandb:project=mine", "--live").stdout
    assert "\x1b" not in printed and "pretrain, step" not in printed and not BRAILLE.search(printed)
    wandb.init.assert_called_once()
    wandb.finish.assert_called_once_with()
    assert wandb.init.call_args.kwargs["project"] == "mine"
    logged = {key for call in wandb.log.call_args_list for key in call.args[0]}
    assert {"pretrain/mfu", "pretrain/weight_norm/embedding", "pretrain/sample"} <= logged

    assert weights(home / ".whorl", "tiny/pretrain") == weights(home / "piped", "tiny/pretrain")
