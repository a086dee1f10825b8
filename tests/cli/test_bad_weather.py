"""Damaged stores, missing paths, odd values and odd terminals: a message, no traceback."""

from __future__ import annotations

import builtins
import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.cli import invoke, refuse, succeed, whorl_command
from tests.support.notes import write_notes

import whorl
from whorl.recipes import runner
from whorl.store import Store
from whorl.tracking.run import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a store of two finished steps."""
    folder = write_notes(tmp_path_factory.mktemp("made"))
    succeed(folder, "run", "tiny.toml", "--until", "curate")
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return shutil.copytree(made, tmp_path / "home")


def test_version_needs_no_verb(tmp_path: Path) -> None:
    assert succeed(tmp_path, "--version").stdout == f"whorl {whorl.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        (("quantise",), "Did you mean 'quantize'", 2),
        (("serve", "x", "--max-num-seq", "3"), "--max-num-seqs", 2),
        (("verify", "--store", "typo"), "there is no store", 1),
        (("gc", "--store", "typo"), "there is no store", 1),
        (("keys", "list", "--file", "typo.json"), "there is no key file", 2),
        (("report", "tiny", "-o", "notes"), "is not a file", 2),
        (("report", "tiny", "-o", "/dev/null"), "/dev/null is not a file", 2),
        (("sample", "tiny/curate", "x", "--temperature", "inf"), "--temperature is inf", 2),
        (("sample", "tiny/curate", "x", "-n", "999999999999"), "at most 1,000,000", 2),
        (("serve", "tiny/curate", "--max-model-len", "1000000000"), "less than or equal to 16777216", 2),
        (("show", "x" * 5000), "is no path: File name too long\n  expected: a name", 2),
        (("run", "r" * 300), "is no path: File name too long", 2),
        (("ls", "--store", "s" * 300), "File name too long\n  do: shorten it", 2),
        (("serve", "~no-such-user/model"), "is no path: Could not determine home directory", 2),
        (("eval", "m" * 300, "--task", "arc"), "is no path", 2),
        (("route", "--discover", "name"), "whorl: --discover name\n  expected: NAME:PORT", 2),
    ],
)
def test_refused_with_a_message(words: tuple[str, ...], message: str, code: int, home: Path) -> None:
    assert message in refuse(home, *words, code=code)


def test_report_follows_a_link(home: Path) -> None:
    (home / "page.html").symlink_to(home / "real.html")
    succeed(home, "report", "tiny", "-o", "page.html")
    assert (home / "page.html").is_symlink() and "<h1>" in (home / "real.html").read_text()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe"])
def test_damaged_name_is_reported_and_repaired(content: bytes, home: Path) -> None:
    name = home / ".whorl" / "names" / "tiny" / "curate"
    name.write_bytes(content)
    assert "tiny/curate" not in succeed(home, "ls").stdout
    succeed(home, "gc")
    assert "the name tiny/curate is damaged: run its recipe again" in invoke(home, "verify").stdout
    succeed(home, "run", "tiny.toml", "--until", "curate")
    succeed(home, "verify")


def test_artifact_without_manifest_is_made_again(home: Path) -> None:
    (home / ".whorl" / "artifacts" / Store(home / ".whorl").open("curate").address / "manifest.json").unlink()
    printed = succeed(home, "run", "tiny.toml", "--until", "curate").stdout
    assert "has no manifest.json; moved to" in printed and "curate: made in" in printed
    succeed(home, "verify")


def test_artifact_has_the_name_of_its_run(home: Path) -> None:
    (home / "other.toml").write_text((home / "tiny.toml").read_text().replace('"tiny"', '"other"'))
    for store in (".whorl", "sp ace"):
        printed = succeed(home, "run", "other.toml", "--until", "curate", "--store", store).stdout
        quoted = "'sp ace'" if " " in store else store
        assert printed.endswith(f"next:   whorl show other/curate --store {quoted}\n")


def test_finished_run_on_a_read_only_store(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReadOnly(Run):
        def __init__(self, dir: Path, **options: Any) -> None:
            if dir.is_relative_to(home):
                raise OSError(errno.EROFS, "Read-only file system", str(dir))
            super().__init__(dir, **options)

    monkeypatch.setattr(runner, "Run", ReadOnly)
    printed = succeed(home, "run", "tiny.toml", "--until", "curate").stdout
    assert "is read-only: log and metrics are in" in printed and printed.count("looked up") == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full exists only on Linux")
@pytest.mark.parametrize(
    ("call", "message", "code"),
    [
        ("-m whorl.cli ls >&-", "standard output is closed", 1),
        ("-m whorl.cli --help >/dev/full", "standard output cannot be written: No space left", 1),
        ("-m whorl.cli ls >/dev/full", "standard output cannot be written: No space left", 1),
        ("-u -m whorl.cli ls >/dev/full", "standard output cannot be written: No space left", 1),
        ("-m whorl.cli sample tiny/curate - <&-", "standard input is closed", 2),
        ("-m whorl.cli ls <&-", "", 0),
    ],
)
def test_closed_and_full_streams(call: str, message: str, code: int, home: Path) -> None:
    script, env = f"exec {sys.executable} {call}", {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(["sh", "-c", script], cwd=home, capture_output=True, text=True, env=env)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
    assert message in done.stderr and len(done.stderr.splitlines()) <= 2


def test_bench_serve_names_its_extra(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_httpx(name: str, *args: Any, **options: Any) -> Any:
        if name == "httpx":
            raise ModuleNotFoundError("No module named 'httpx'", name="httpx")
        return real(name, *args, **options)

    for name in [n for n in sys.modules if n.startswith("whorl.loadtest.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_httpx)
    assert "pip install 'whorl[serve]'" in refuse(home, "bench-serve", "http://127.0.0.1:9")


def test_deleted_folder_and_ascii_terminal(home: Path) -> None:
    gone = home / "gone"
    gone.mkdir()
    script = f"rmdir {gone}; exec {sys.executable} -m whorl.cli ls"
    done = subprocess.run(["sh", "-c", script], cwd=gone, capture_output=True, text=True)
    assert done.returncode == 2 and "working directory does not exist" in done.stderr, done.stderr
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    drawn = subprocess.run(
        whorl_command("lineage", "curate"), cwd=home, capture_output=True, text=True, env=ascii_only
    )
    assert drawn.returncode == 0 and "\\u2514" in drawn.stdout, drawn.stderr
