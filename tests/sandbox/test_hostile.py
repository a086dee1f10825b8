"""Programs that want out: what each tries, and that it does not get there. Each prints what it got hold of."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from whorl.sandbox import ResourceLimits, Sandbox

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="confinement is Linux's")
LIMITS = ResourceLimits(
    wall_seconds=20, cpu_seconds=20, memory_bytes=128 << 20, file_bytes=64 << 10, output_bytes=4096
)


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox(LIMITS, workers=1) as sandbox:
        yield sandbox


def attempt(sandbox: Sandbox, source: str, *errors: str) -> None:
    """The statement raises one of these errors inside, and the program can go on: it prints the error's name."""
    body = "\n".join("    " + line for line in source.strip().splitlines())
    outcome = sandbox.run(
        f"try:\n{body}\n    print('escaped')\nexcept BaseException as e:\n    print(type(e).__name__)"
    )
    assert outcome.ok, outcome
    assert outcome.output.strip() in (errors or ("PermissionError",)), outcome


@pytest.mark.parametrize(
    "source",
    [
        "open('/etc/passwd').read()",
        "open('/proc/self/environ').read()",
        "import os; open(f'/proc/{os.getppid()}/environ').read()",
        "import os; os.listdir('/')",
        "import os; os.fork()",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import os; os.kill(1, 0)",
        "import os; os.kill(-1, 0)",
        "import os; os.killpg(os.getpgrp(), 0)",
        "import os; os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import os; os.sched_setaffinity(0, {0})",
        "import os; os.setuid(1)",
        "import os; os.memfd_create('code')",
        "import os; os.chroot('.')",
        "import os; os.mkfifo('pipe')",
        "import os; os.chown('.', 0, 0)",
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        "import socket; socket.socket()",
        "import socket; socket.socketpair()",
        "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)",
    ],
)
def test_no_way_out(sandbox: Sandbox, source: str) -> None:
    attempt(sandbox, source)


@pytest.mark.parametrize(
    "source",
    [
        "open('{file}').read()",
        "open('{file}', 'w')",
        "open('{file}', 'a')",
        "open('{folder}/new', 'w')",
        "import os; os.listdir('{folder}')",
        "import os; os.open('{file}', os.O_RDONLY | os.O_TRUNC)",
        "import os; os.truncate('{file}', 0)",
        "import os; os.chmod('{file}', 0o777)",
        "import os; os.utime('{file}')",
        "import os; os.unlink('{file}')",
        "import os; os.rename('{file}', 'mine')",
        "import os; os.rename('{folder}', 'mine')",
        "import os; os.link('{file}', 'mine')",
        "import os; os.symlink('{file}', 'mine'); open('mine').read()",
        "import os; os.mkdir('{folder}/sub')",
        "import os; os.chdir('{folder}'); open('file').read()",
        "import shutil; shutil.copy('{file}', 'mine')",
    ],
)
def test_a_file_of_the_user_is_neither_read_nor_touched(
    sandbox: Sandbox, tmp_path: Path, source: str
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    before = file.stat()
    attempt(sandbox, source.format(file=file, folder=tmp_path), "PermissionError", "OSError")
    after = file.stat()
    assert file.read_text() == "mine" and list(tmp_path.iterdir()) == [file]
    assert (before.st_mode, before.st_mtime_ns, before.st_nlink) == (
        after.st_mode,
        after.st_mtime_ns,
        after.st_nlink,
    )


@pytest.mark.parametrize("name", ["ctypes", "_ctypes", "sqlite3", "numpy", "torch", "whorl.errors"])
def test_no_module_in_machine_code_and_none_of_the_users(sandbox: Sandbox, name: str) -> None:
    attempt(sandbox, f"import {name}", "ModuleNotFoundError", "ImportError", "PermissionError")


def test_ctypes_does_not_come_back_by_the_usual_ways(sandbox: Sandbox) -> None:
    attempt(
        sandbox,
        "import sys\nfor n in ('ctypes', '_ctypes'): sys.modules.pop(n)\nimport ctypes\nctypes.CDLL(None).getpid()",
        "ModuleNotFoundError",
        "ImportError",
    )


def test_nothing_of_the_parent_is_to_be_seen(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    readable, writable = os.pipe()
    os.set_inheritable(writable, True)
    with socket.socket() as held:
        os.set_inheritable(held.fileno(), True)
        with Sandbox(LIMITS, workers=1) as fresh:
            outcome = fresh.run(
                "import os, sys\nprint(dict(os.environ), os.getenv('TOKEN'), sys.argv, "
                "[m for m in sys.modules if 'whorl' in m])\n"
                "def is_open(n):\n    try: os.fstat(n)\n    except OSError: return False\n    return True\n"
                "print(sum(map(is_open, range(4096))))"
            )
    os.close(readable), os.close(writable)
    assert outcome.output == "{} None ['program.py'] []\n5\n"  # the three streams and the two pipes


def test_a_fork_bomb_is_one_process(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import os\nwhile True:\n    os.fork()")
    assert outcome.kind == "raised" and "PermissionError" in outcome.reason


def test_a_memory_bomb_hits_the_limit(sandbox: Sandbox) -> None:
    assert sandbox.run("a = []\nwhile True:\n    a.append(bytearray(1 << 20))").reason == "memory"


def test_an_endless_loop_is_ended_whatever_it_catches() -> None:
    hold = "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    hold += "    except (OSError, ValueError): pass\n"
    loop = "while True:\n    try:\n        while True: pass\n    except BaseException: pass"
    with Sandbox(ResourceLimits(wall_seconds=0.2), workers=1) as quick:
        assert quick.run(hold + loop).reason == "time"
        assert quick.run("import time\ntime.sleep(1000)").reason == "time"
        assert quick.restarts == 0
    with Sandbox(ResourceLimits(wall_seconds=60, cpu_seconds=1), workers=1) as slow:
        assert slow.run(hold + loop).reason == "cpu"


def test_a_flood_of_output_is_cut(sandbox: Sandbox) -> None:
    outcome = sandbox.run("import os\nwhile True:\n    os.write(1, b'x' * 4096)")
    assert outcome.reason == "output" and len(outcome.output) == LIMITS.output_bytes
    assert sandbox.run("while True:\n    print('x' * 100)").reason == "output"


def test_files_stay_in_the_folder_and_below_the_limit(sandbox: Sandbox) -> None:
    assert sandbox.run("open('a', 'w').write('x')\nassert open('a').read() == 'x'").ok
    assert sandbox.run("import os\nassert os.listdir('.') == []").ok, "the folder was not cleared"
    outcome = sandbox.run("open('a', 'wb').write(bytes(1 << 20))")
    assert outcome.kind == "files" or "File too large" in outcome.reason
    many = "import itertools\nfor i in itertools.count():\n    open(f'f{i}', 'wb').write(bytes(4096))"
    assert sandbox.run(many).reason == "files"
    deep = "import os\nwhile True:\n    os.mkdir('d'); os.chdir('d')"
    assert sandbox.run(deep).kind in ("files", "raised")
    closed = (
        "import os\nos.umask(0o777)\nfor i in range(9):\n    os.mkdir(str(i))\n    open('f' + str(i), 'w')"
    )
    assert sandbox.run(closed).ok
    assert sandbox.run("import os\nos.mkdir('0'); os.mkdir('0/0'); os.symlink").ok
    assert sandbox.run("import os\nassert os.listdir('.') == []").ok
    assert sandbox.restarts == 0
    with Sandbox(ResourceLimits(wall_seconds=20, file_bytes=0), workers=1) as none:
        assert "PermissionError" in none.run("open('a', 'w')").reason


def test_threads_are_refused_or_counted_and_die_with_the_program() -> None:
    stay = "import threading, time\nfor _ in range({n}):\n    threading.Thread(target=time.sleep, args=(1000,)).start()"
    with Sandbox(LIMITS, workers=1) as none:
        assert "can't start new thread" in none.run(stay.format(n=1)).reason
    with Sandbox(ResourceLimits(processes=3, wall_seconds=20, memory_bytes=4 << 30), workers=1) as few:
        assert few.run(stay.format(n=2)).ok
        assert few.run(stay.format(n=20) + "\ntime.sleep(1000)").reason == "threads"


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()", {"memory", "crashed", "raised"}),
        ("def f(): f()\nf()", {"raised"}),
        ("x = " + "(" * 5000 + ")" * 5000, {"syntax"}),
        ("import os\nos.abort()", {"crashed"}),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", {"crashed"}),
        ("import signal\nsignal.raise_signal(35)", {"crashed"}),
        ("import signal, time\nsignal.setitimer(signal.ITIMER_REAL, 0.01)\ntime.sleep(1000)", {"crashed"}),
        ("x = '\ud800'", {"syntax"}),
        ("x = '\0'", {"syntax"}),
        ("class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", {"raised"}),
        ("raise KeyboardInterrupt", {"raised"}),
    ],
)
def test_ends_of_all_kinds_are_told(sandbox: Sandbox, source: str, kind: set[str]) -> None:
    outcome = sandbox.run(source)
    assert not outcome.ok and outcome.kind in kind, outcome
    assert sandbox.run("pass").ok


def test_raising_where_nobody_listens_changes_nothing(sandbox: Sandbox) -> None:
    outcome = sandbox.run(
        "class A:\n    def __del__(self): raise ValueError('in del')\na = A()\ndel a\nb = A()"
    )
    assert outcome.ok and "in del" in outcome.output
    assert sandbox.run("import atexit, os\natexit.register(os._exit, 3)").ok


def test_no_process_is_left_behind() -> None:
    with Sandbox(ResourceLimits(wall_seconds=0.2), workers=2) as sandbox:
        sandbox.run_all(["import os\nos.setsid()" if i % 2 else "while True: pass" for i in range(4)])
        pids = [w.process.pid for w in sandbox._workers if w is not None]
        roots = [w.root for w in sandbox._workers if w is not None]
        listing = subprocess.run(
            ["ps", "-eo", "ppid="], capture_output=True, text=True, check=True
        ).stdout.split()
        assert not {str(p) for p in pids} & set(listing)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not any(Path(r).exists() for r in roots)
