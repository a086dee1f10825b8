"""`whorl profile`, and what a terminal, a pipe and a logger see of a run: real processes."""

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
        with open("heard.jsonl", "a") as file:
            file.write(json.dumps([name, arguments, named], default=str) + "\\n")
    return call
"""


def whorl(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "whorl.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=240)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus and a recipe whose steps before training are made."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "notes").mkdir()
    words = ["ba", "ce", "di", "fo", "gu", "ha", "le", "mi", "no", "pu"]
    for n in range(60):
        numbers = [(n * 7919 + i * i * 31) % 997 for i in range(120)]
        text = "".join(
            "".join(words[int(d)] for d in str(x)) + " \n"[i % 8 == 7] for i, x in enumerate(numbers)
        )
        (folder / "notes" / f"{n}.txt").write_text(f"Note {n}.\n{text}\n")
    (folder / "small.toml").write_text(RECIPE)
    done = whorl("run", "small.toml", "--until", "tokens", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_profile_prints_figures_as_json_and_nothing_else(home: Path) -> None:
    done = whorl("profile", "small.toml", "--steps", 2, "--json", "--trace", "t.json.gz", cwd=home)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 2 and not figures["compiled"] and figures["step_seconds"] > 0
    assert figures["parts"]["optimiser"]["forward"] > 0 and figures["classes"]["matrix products"]["flops"] > 0
    assert "tokens: looked up" in done.stderr
    with gzip.open(home / "t.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_profile_prints_tables_and_says_how_to_open_the_trace(home: Path) -> None:
    done = whorl("profile", "small.toml", "--steps", 2, "--eager", cwd=home)
    assert done.returncode == 0, done.stderr
    for expected in (
        "A step takes",
        "attention",
        "head, loss",
        "optimiser",
        "matrix products",
        "bound",
        "ui.perfetto.dev",
    ):
        assert expected in done.stdout, expected
    (trace,) = re.findall(r"trace: (\S+)", done.stdout)
    assert Path(trace).exists()
    assert whorl("show", "model", cwd=home).returncode != 0  # nothing was trained for keeps


def test_profile_of_a_recipe_that_trains_nothing_is_refused(home: Path) -> None:
    (home / "none.toml").write_text('name = "none"\n[steps.ingest]\nsources = ["notes"]\n')
    done = whorl("profile", "none.toml", cwd=home)
    assert done.returncode == 2 and "no steps that pretrain" in done.stderr
    done = whorl("profile", "small.toml", "--step", "tokens", cwd=home)
    assert done.returncode == 2 and "pretrain" in done.stderr


def test_a_logger_that_is_not_there_is_refused_before_any_work(home: Path) -> None:
    done = whorl("run", "small.toml", "--log", "tensorboad", "--store", "elsewhere", cwd=home)
    assert done.returncode == 2 and "wandb" in done.stderr and not (home / "elsewhere").exists()


def test_a_terminal_sees_a_dashboard_a_pipe_does_not_and_the_model_is_the_same(home: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "whorl.cli",
        "run",
        "small.toml",
        "--set",
        "pretrain.checkpoint_seconds=60",
    ]
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"}
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        environment.pop(name, None)
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, cwd=home, env=environment)
    os.close(its)
    seen = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        seen += part
        if not part:
            break
    os.close(ours)
    assert process.wait(timeout=60) == 0, seen.decode(errors="replace")
    text = seen.decode(errors="replace")
    for expected in ("pretrain, step", "held-out", "utilisation", "Training: 40 of 40 steps"):
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
    heard = [json.loads(line) for line in (home / "heard.jsonl").read_text().splitlines()]
    assert heard[0][0] == "init" and heard[0][2]["project"] == "mine" and heard[-1][0] == "finish"
    logged = [call[1][0] for call in heard if call[0] == "log"]
    assert any("pretrain/utilisation" in record for record in logged)
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
