"""Files that are in the work folder at the start, and those that a program leaves there."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whorl.errors import ConfigError
from whorl.sandbox import Program, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement needs Linux")
NAME = st.text("abc.-é_ ", min_size=1, max_size=8).filter(lambda name: name not in (".", ".."))


def test_files_are_read_changed_and_returned(sandbox: Sandbox) -> None:
    source = (
        "import os\ntext = open('in/a.txt').read()\nos.makedirs('out/deep')\n"
        "open('out/deep/b.txt', 'w').write(text.upper())\nos.remove('in/a.txt')\nopen('c', 'wb').write(b'\\0\\xff')"
    )
    result = sandbox.run(Program(source, files={"in/a.txt": b"text"}, keep_files=True))
    assert (
        result.ok
        and result.files == {"out/deep/b.txt": b"TEXT", "c": b"\0\xff"}
        and not result.files_left_out
    )
    assert (
        sandbox.run("import os\nprint(os.listdir())").output == "[]\n"
    )  # nothing is left for the next program
    assert sandbox.run(Program("open('a', 'w')")).files == {}


def test_tests_inspect_files_of_the_folder(sandbox: Sandbox) -> None:
    files = {"total.txt": b"42\n"}
    assert sandbox.run(Program("", "assert open('total.txt').read().strip() == '42'", files=files)).ok
    failed = sandbox.run(Program("", "assert open('total.txt').read().strip() == '43'", files=files))
    assert failed.kind == "failed"


@settings(max_examples=20)
@given(files=st.dictionaries(NAME, st.binary(max_size=50), max_size=4))
def test_any_files_come_back_unchanged(sandbox: Sandbox, files: dict[str, bytes]) -> None:
    result = sandbox.run(Program("", files=files, keep_files=True))
    assert result.ok and result.files == files


def test_files_of_a_killed_program_are_kept(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("open('a', 'w').write('x'); import os; os._exit(3)", keep_files=True))
    assert result.kind == "exited" and result.files == {"a": b"x"}


def test_links_fifos_and_excess_are_left_out(sandbox: Sandbox) -> None:
    source = """
import os
open('a', 'w').write('kept')
for make in (lambda: os.symlink('/etc/passwd', 'link'), lambda: os.link('a', 'same'), lambda: os.mkfifo('fifo')):
    try:
        make()
    except OSError:
        pass
open(b'\\xff', 'w').write('no UTF-8')
for i in range(1500):
    open(f'many{i}', 'w')
"""
    result = sandbox.run(Program(source, keep_files=True))
    assert result.files.get("a") == b"kept" and "link" not in result.files and "fifo" not in result.files
    assert len(result.files) <= 1000 and result.files_left_out > 0
    assert all(path.isprintable() for path in result.files)


def test_large_files_exceed_the_limit(sandbox: Sandbox) -> None:
    result = sandbox.run(Program("open('a', 'w').write('x' * (1 << 20))", keep_files=True))
    assert not result.ok and sum(map(len, result.files.values())) <= 64 << 10


@pytest.mark.parametrize(
    "path", ["/etc/a", "../a", "a/../../b", "a//b", "", ".", "a\0b", "a\nb", "x" * 101, "a/" * 600]
)
def test_paths_out_of_the_folder_are_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(ConfigError, match="no path of a file in the work folder"):
        sandbox.run(Program("", files={path: b""}))


def test_file_that_is_a_folder_of_another_is_refused(sandbox: Sandbox) -> None:
    with pytest.raises(ConfigError, match="'a' is no path"):
        sandbox.run(Program("", files={"a": b"", "a/b": b""}))
