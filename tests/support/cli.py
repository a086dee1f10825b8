"""Calls of the command line, in a process or in this one, and a small corpus."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from whorl.cli import build_app

SYLLABLES = ["ba", "ce", "di", "fo", "gu", "ha", "le", "mi", "no", "pu"]


def run_whorl(
    *words: object, cwd: Path | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run `whorl` in a new process."""
    command = [sys.executable, "-m", "whorl.cli", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)


def kill_when(folder: Path, pattern: str, *words: object, cwd: Path, group: bool = True) -> bool:
    """Run `whorl` in a new process and SIGKILL it as soon as `pattern` matches in `folder`; whether it was killed."""
    command = [sys.executable, "-m", "whorl.cli", *map(str, words)]
    process = subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline, killed = time.monotonic() + 120, False
    while process.poll() is None and time.monotonic() < deadline:
        if any(folder.glob(pattern)):
            (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
            killed = True
            break
        time.sleep(0.002)
    process.wait(timeout=60)
    return killed


def invoke(folder: Path, *words: object, stdin: str | bytes = "") -> Result:
    """Run `whorl` in this process, in a folder."""
    with pytest.MonkeyPatch().context() as patched:
        patched.chdir(folder)
        return CliRunner().invoke(build_app(), [*map(str, words)], input=stdin)


def spell(number: int) -> str:
    """Return an invented word for a number."""
    return "".join(SYLLABLES[int(digit)] for digit in str(number))


def write_notes(folder: Path, n: int = 60) -> None:
    """Write `n` text files of invented words into `folder/notes`."""
    (folder / "notes").mkdir()
    for number in range(n):
        numbers = [(number * 7919 + i * i * 31) % 997 for i in range(120)]
        words = "".join(spell(value) + " \n"[i % 8 == 7] for i, value in enumerate(numbers))
        (folder / "notes" / f"{number}.txt").write_text(f"Note {number}.\n{words}\n")
