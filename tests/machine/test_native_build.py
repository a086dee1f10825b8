"""Builds of several native libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from whorl.machine import native_build

# Each waits until two have started, and fails otherwise.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit 0
for output; do :; done
cat /proc/$$/stat > "{folder}/$$"
for i in $(seq 100); do
    [ $(ls "{folder}" | wc -l) -ge 2 ] && echo built > "$output" && exit 0
    sleep 0.02
done
exit 1
"""


def test_libraries_are_compiled_two_at_a_time_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, compiler = tmp_path / "started", tmp_path / "compiler"
    started.mkdir()
    compiler.write_text(COMPILER.format(folder=started))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native_build, "_later", [])  # what other tests of this process left
    sources = [(tmp_path / folder / "same.cpp", ("-g",)) for folder in "ab"]  # one name is no reason to wait
    for source, _ in sources:
        source.parent.mkdir()
        source.write_text(f"// {source.parent.name}")
    monkeypatch.setenv("WHORL_CHOOSE", "cpu=torch")
    native_build.build_libraries(sources)
    assert not [*started.iterdir()]
    monkeypatch.delenv("WHORL_CHOOSE")
    later = tmp_path / "later.cpp"
    later.write_text("// later")
    native_build.start_builds(sources, [(later, ())])
    native_build.finish_builds()
    native_build.start_later_builds()
    folder = native_build.cache_folder()
    assert all(native_build.library_file(source, folder, flags).exists() for source, flags in sources)
    native_build.build_libraries(sources)
    made = native_build.library_file(later, folder)
    for _ in range(1000):
        if made.exists():
            break
        time.sleep(0.02)
    assert made.exists()
    policies = [int(path.read_text().rpartition(")")[2].split()[38]) for path in started.iterdir()]
    assert sorted(policies) == [os.SCHED_OTHER, os.SCHED_OTHER, os.SCHED_IDLE]


def test_two_processes_build_one_library(tmp_path: Path) -> None:
    source, folder = tmp_path / "a.cpp", tmp_path / "kept"
    source.write_text('extern "C" int answer() { return 2; }')
    load = "import sys; from pathlib import Path; from whorl.machine.native_build import load_library"
    command = [
        sys.executable,
        "-c",
        f"{load}; print(load_library(Path(sys.argv[1]), Path(sys.argv[2])).answer())",
    ]
    started = [
        subprocess.Popen([*command, source, folder], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0] for process in started] == ["2\n", "2\n"]
    (file,) = folder.glob("*.so")
    assert {path.name for path in folder.iterdir()} == {f"{file.stem}.lock", file.name}


def test_a_build_that_fails_is_left_to_the_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_build.build_libraries([(tmp_path / "a.cpp", ())])
    with pytest.raises(native_build.BuildError, match="no-such-compiler"):
        native_build.load_library(tmp_path / "a.cpp", tmp_path)


def test_shared_headers_are_found_and_part_of_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(native_build, "SHARED_HEADERS", shared)
    source = tmp_path / "a.cpp"
    source.write_text('#include "answer.h"\nextern "C" int answer() { return ANSWER; }\n')
    for value in (1, 2):
        (shared / "answer.h").write_text(f"#define ANSWER {value}\n")
        assert native_build.load_library(source, tmp_path).answer() == value


def test_code_that_the_cpu_refuses_is_dropped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "a.cpp"
    source.write_text(
        """extern "C" void whorl_try() {
        #ifdef LIAR
            __builtin_trap();
        #endif
        }
        extern "C" int answer() {
        #ifdef LIAR
            return 1;
        #endif
            return 2;
        }"""
    )
    monkeypatch.setattr(native_build, "ARCH_FLAGS", (("-DLIAR",), ()))
    with pytest.warns(RuntimeWarning, match=r"a\.cpp: code for -DLIAR was killed by SIGILL; it is not used"):
        assert native_build.load_library(source, tmp_path).answer() == 2
    assert (
        native_build.load_library(source, tmp_path).answer() == 2
    )  # kept: no second trial, no second warning
    monkeypatch.setattr(native_build, "ARCH_FLAGS", (("-DLIAR",),))
    with pytest.warns(RuntimeWarning), pytest.raises(native_build.BuildError, match="SIGILL"):
        native_build.load_library(source, tmp_path)


def test_error_names_the_line_of_an_included_file(tmp_path: Path) -> None:
    """Not the first line of the compiler's output, which says where the file was included."""
    (tmp_path / "b.h").write_text("int wrong(\n")
    source = tmp_path / "a.cpp"
    source.write_text('#include "b.h"\n')
    with pytest.raises(native_build.BuildError, match=r"cannot build a\.cpp: .*error"):
        native_build.load_library(source, tmp_path)


OLD_COMPILER = """#!/bin/sh
for word; do
    case $word in -m*) echo "error: bad value ($word)" >&2; exit 1;; esac
done
exec {compiler} "$@"
"""


def test_compiler_that_does_not_support_the_cpu_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, source = tmp_path / "old", tmp_path / "a.cpp"
    old.write_text(OLD_COMPILER.format(compiler=native_build.find_compiler()))
    old.chmod(0o755)
    source.write_text('extern "C" int answer() { return 2; }')
    monkeypatch.setenv("CXX", str(old))
    with pytest.warns(
        RuntimeWarning, match=r"a\.cpp is built for any CPU, .*old: error: bad value \(-march=native\)"
    ):
        assert native_build.load_library(source, tmp_path).answer() == 2
    old.write_text(old.read_text().replace("-m*)", "-std=*)"))  # too old for C++17
    with pytest.raises(
        native_build.BuildError, match=r"cannot build a\.cpp: error: bad value \(-std=c\+\+17\)"
    ):
        native_build.load_library(source, tmp_path / "other")


def test_a_later_build_ends_with_its_process(tmp_path: Path) -> None:
    """Its compiler runs in another process group, and gets no time while others want the cores."""
    compiler, source, started = tmp_path / "compiler", tmp_path / "a.cpp", tmp_path / "started"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exit 0\necho $$ > {started}.new\nmv {started}.new {started}\nsleep 60\n'
    )
    compiler.chmod(0o755)
    source.write_text("")
    code = (
        "import pathlib, time\nfrom whorl.machine import native_build\n"
        f"native_build.start_builds([], [(pathlib.Path({str(source)!r}), ())])\nnative_build.start_later_builds()\n"
        f"while not pathlib.Path({str(started)!r}).exists(): time.sleep(0.02)\n"
    )
    environment = os.environ | {"CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, timeout=60, check=True)
    state = Path(f"/proc/{started.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"
    assert not list((tmp_path / "whorl" / "native").glob("*.so"))


def test_a_killed_compiler_is_no_reason_for_slower_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, source = tmp_path / "compiler", tmp_path / "a.cpp"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\nkill -KILL $$\n')
    compiler.chmod(0o755)
    source.write_text("")
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(native_build.BuildError, match=r"was killed while it built a\.cpp"):
        native_build.load_library(source, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*.so"))
