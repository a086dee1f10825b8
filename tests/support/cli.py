"""Calls of the command line, in a process or in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from whorl.cli import build_app
from whorl.store import Store


def whorl_command(*words: object) -> list[str]:
    return [sys.executable, "-m", "whorl.cli", *map(str, words)]


def run_whorl(
    *words: object, cwd: Path | None = None, timeout: float = 300, env: Mapping[str, str] = os.environ
) -> subprocess.CompletedProcess[str]:
    """Run `whorl` in a new process."""
    command = whorl_command(*words)
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, env=env)


def start_whorl(*words: object, **options: Any) -> subprocess.Popen[str]:
    """Start `whorl` in a new process and session, with pipes as its streams."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    return subprocess.Popen(whorl_command(*words), **{**streams, **options})


def output_of(*words: object, cwd: Path | None = None, env: Mapping[str, str] = os.environ) -> str:
    """Run `whorl` in a new process, assert that it succeeds, and return its standard output."""
    done = run_whorl(*words, cwd=cwd, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def weights(store: Path, name: str) -> bytes:
    """The weights of a model in a store."""
    return Store(store).open(name).file("model.safetensors").read_bytes()


def invoke(folder: Path, *words: object, stdin: str | bytes = "") -> Result:
    """Run `whorl` in this process, in a folder."""
    with pytest.MonkeyPatch().context() as patched:
        patched.chdir(folder)
        return CliRunner().invoke(build_app(), [*map(str, words)], input=stdin)


def succeed(folder: Path, *words: object, stdin: str | bytes = "") -> Result:
    """Run `whorl` in this process, and assert that it succeeds."""
    result = invoke(folder, *words, stdin=stdin)
    assert result.exit_code == 0, result.output
    return result


def refuse(folder: Path, *words: object, code: int = 2) -> str:
    """Run `whorl` in this process, assert that it fails with a message and `code`, and return the message."""
    result = invoke(folder, *words)
    assert result.exit_code == code and isinstance(result.exception, SystemExit), result.output
    return result.stderr
