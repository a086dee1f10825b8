"""`whorl profile`; output of `whorl run` to a terminal, a pipe and a metrics logger."""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from tests.support.cli import run_whorl, write_notes

RECIPE = """\
name = "small"
[steps.ingest]
sources = ["notes"]
[steps.curate]
parents = ["ingest"]
validation_bytes = 2000
test_bytes = 2000
max_held_out_fraction = 0.3
[steps.plan]
parents = ["ingest", "curate"]
steps = 40
d_model = 64
n_layers = 1
vocab_size = 320
seq_len = 32
ngram_buckets = 64
compile = false
replicas = 1
[steps.tokenizer]
parents = ["ingest", "curate", "plan"]
[steps.tokens]
parents = ["ingest", "curate", "tokenizer"]
[steps.pretrain]
parents = ["plan", "tokens", "tokenizer"]
serial_loader = true
"""
BRAILLE = re.compile("[\u2801-\u28ff]")
FAKE = """
import json
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    def call(*arguments, **named):
        with open("calls.jsonl", "a") as file:
            file.write(json.dumps([name, arguments, named], default=str) + "\\n")
    return call
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus and a recipe; the steps before training are made."""
    folder = tmp_path_factory.mktemp("home")
    write_notes(folder)
    (folder / "small.toml").write_text(RECIPE)
    done = run_whorl("run", "small.toml", "--until", "tokens", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_profile_prints_json_only(home: Path) -> None:
    done = run_whorl("profile", "small.toml", "--steps", 2, "--json", "--trace", "t.json.gz", cwd=home)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 2 and not figures["compiled"] and figures["step_seconds"] > 0
    assert figures["parts"]["optimizer"]["forward"] > 0 and figures["classes"]["matmul"]["flops"] > 0
    assert "tokens: looked up" in done.stderr
    with gzip.open(home / "t.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_profile_prints_tables_and_trace(home: Path) -> None:
    done = run_whorl("profile", "small.toml", "--steps", 2, "--eager", cwd=home)
    assert done.returncode == 0, done.stderr
    for expected in (
        "A step takes",
        "attention",
        "head, loss",
        "optimizer",
        "matmul",
        "bound",
        "ui.perfetto.dev",
    ):
        assert expected in done.stdout, expected
    (trace,) = re.findall(r"trace: (\S+)", done.stdout)
    assert Path(trace).exists()
    assert run_whorl("show", "model", cwd=home).returncode != 0  # no model is kept


def test_profile_refuses_recipe_without_training(home: Path) -> None:
    (home / "none.toml").write_text('name = "none"\n[steps.ingest]\nsources = ["notes"]\n')
    done = run_whorl("profile", "none.toml", cwd=home)
    assert done.returncode == 2 and "no pretraining steps" in done.stderr
    done = run_whorl("profile", "small.toml", "--step", "tokens", cwd=home)
    assert done.returncode == 2 and "pretrain" in done.stderr


def test_unknown_logger_is_refused_before_work(home: Path) -> None:
    done = run_whorl("run", "small.toml", "--log", "tensorboad", "--store", "elsewhere", cwd=home)
    assert done.returncode == 2 and "wandb" in done.stderr and not (home / "elsewhere").exists()


def test_dashboard_is_shown_on_terminal_only(home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "whorl.cli",
        "run",
        "small.toml",
        "--set",
        "pretrain.checkpoint_seconds=60",
    ]
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=home, env=environment)
    os.close(slave)
    output = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:
            break
        output += part
        if not part:
            break
    os.close(master)
    assert process.wait(timeout=60) == 0, output.decode(errors="replace")
    text = output.decode(errors="replace")
    for expected in ("pretrain, step", "held-out", "MFU", "Training: 40 of 40 steps"):
        assert expected in text, expected
    assert BRAILLE.search(text)
    assert not BRAILLE.search(text[text.rindex("Training: 40 of 40") :])

    (home / "fakes").mkdir()
    (home / "fakes" / "wandb.py").write_text(FAKE)
    environment["PYTHONPATH"] = f"{home / 'fakes'}:{os.environ.get('PYTHONPATH', '')}"
    more = ["--store", "piped", "--log", "wandb:project=mine", "--live"]
    done = subprocess.run(
        [*command, *more], capture_output=True, text=True, cwd=home, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert (
        "\x1b" not in done.stdout and "pretrain, step" not in done.stdout and not BRAILLE.search(done.stdout)
    )
    calls = [json.loads(line) for line in (home / "calls.jsonl").read_text().splitlines()]
    assert calls[0][0] == "init" and calls[0][2]["project"] == "mine" and calls[-1][0] == "finish"
    logged = [call[1][0] for call in calls if call[0] == "log"]
    assert any("pretrain/mfu" in record for record in logged)
    assert any("pretrain/weight_norm/embedding" in record for record in logged)
    assert any("pretrain/sample" in record for record in logged)

    weights = [
        next((home / store).glob("**/model/*/model.safetensors"), None) for store in (".whorl", "piped")
    ]
    weights = [
        w or next((home / s).rglob("*.safetensors"))
        for w, s in zip(weights, (".whorl", "piped"), strict=True)
    ]
    assert weights[0].read_bytes() == weights[1].read_bytes()
