"""Child processes: arguments, inherited state, ends, and the fork server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tests.support.children import children

from whorl.machine import fork_server, process
from whorl.machine.process import Channel, Child, Descriptor, start_command, wait_for

ENTRIES = "tests.support.child_entries:"
KINDS = pytest.mark.parametrize("preload", [(), ("torch",)], ids=["interpreter", "fork"])
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    """Return a function that starts a child of `child_entries`; it is killed at the end."""
    started = list[Child]()

    def call(entry: str, *args: Any, **options: Any) -> Child:
        started.append(Child(ENTRIES + entry, *args, **options))
        return started[-1]

    yield call
    for child in started:
        child.kill()
        child.channel.close()


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@KINDS
def test_child_killed_while_it_starts_does_not_hang(
    start: Any, preload: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its arguments are larger than a socket's buffer, and nothing reads them any more."""
    where, name = (fork_server, "fork" if preload else "NewInterpreter")
    begin = getattr(where, name)

    def begin_and_kill(*args: Any) -> Any:
        begun = begin(*args)
        os.kill(begun.pid, signal.SIGKILL)
        return begun

    monkeypatch.setattr(where, name, begin_and_kill)
    child = start("echo", b"x" * 30_000_000, preload=preload)
    assert child.wait(20) == -signal.SIGKILL


@KINDS
def test_messages_arrive_in_order(start: Any, preload: tuple[str, ...]) -> None:
    child = start("echo", 1, {"a": [None]}, preload=preload)
    assert child.channel.recv() == (1, {"a": [None]})
    for message in ("x", b"y" * 3_000_000, ("z", 4)):
        child.channel.send(message)
        assert child.channel.recv() == message
    assert child.poll() is None
    assert child.close() == 0


@KINDS
def test_child_inherits_settings(
    start: Any, preload: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that changed after the fork server started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("CHILD_TEST", "from the parent")
    (core, *_) = os.sched_getaffinity(0)
    child = start(
        "describe", 5, name="my child", preload=preload, nice=3, cores=(core,), ignore=(signal.SIGTERM,),
        new_session=True,
    )  # fmt: skip
    found = child.channel.recv()
    assert found["directory"] == found["path"] == str(tmp_path) and found["cores"] == {core}
    assert (
        found["variable"] == "from the parent"
        and found["nice"] == os.nice(0) + 3
        and found["name"] == "my child"
    )
    assert found["sigterm"] and found["session"] and found["value"] == 5 and found["torch_threads"] == 1
    monkeypatch.delenv("CHILD_TEST")
    assert start("describe", 6, preload=preload).channel.recv()["variable"] is None


@KINDS
def test_tensors_files_and_pipes_are_shared(start: Any, preload: tuple[str, ...], tmp_path: Path) -> None:
    """More descriptors than one message of the kernel takes."""
    import torch.multiprocessing  # registers how tensors are shared

    tensors = [torch.zeros(n + 1) for n in range(300)]
    view = tensors[7].view(2, 4)
    own_end, child_end = Pipe()
    with (tmp_path / "file").open("wb") as file:
        fds = [Descriptor(file.fileno())] * 3
        child = start("add_one", [*tensors, view], fds, child_end, preload=preload, share_tensors=True)
        assert child.channel.recv() == "done" and own_end.recv() == "done"
    assert all(bool((t == (2 if n == 7 else 1)).all()) for n, t in enumerate(tensors))
    assert (tmp_path / "file").read_bytes() == b"xxx"


def test_tensors_are_copied_unless_shared(start: Any) -> None:
    tensor = torch.zeros(3)
    child = start("echo", tensor)
    (copy,) = child.channel.recv()
    copy += 1
    assert not tensor.any() and not tensor.is_shared()


@KINDS
@pytest.mark.parametrize(("how", "code", "words"), [
    ("raise", 1, "ended with exit code 1"), ("exit", 3, "ended with exit code 3"),
    ("kill", -9, "was killed by SIGKILL"), ("close", 0, "ended with exit code 0"),
])  # fmt: skip
def test_exit_code(
    start: Any, preload: tuple[str, ...], how: str, code: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    child = start("exit_with", how, name="worker", preload=preload)
    if how == "close":
        child.channel.close()
    assert child.wait(20) == child.poll() == code
    assert child.exit_description() == f"worker (process {child.pid}) {words}"
    assert ("the child's own words" in capfd.readouterr().err) == (how == "raise")


@KINDS
def test_kill_reaches_the_session(start: Any, preload: tuple[str, ...]) -> None:
    child = start("hang", preload=preload, new_session=True)
    pid, grandchild = child.channel.recv()
    assert pid == child.pid and child.wait(0.05) is None
    assert child.kill() == -signal.SIGKILL
    wait_until(lambda: ended(grandchild))


SCRIPT = """
    import sys, threading, time
    sys.path.insert(0, sys.argv[1])
    from whorl.machine.process import Child

    class Here:  # a class of the main script
        value = 17

    def start():
        return Child("tests.support.child_entries:hang", sys.argv[2] == "gil", preload=sys.argv[3:])

    if __name__ == "__main__":
        echo = Child("tests.support.child_entries:echo", Here(), preload=sys.argv[3:])
        assert echo.channel.recv()[0].value == 17
        children = [start()]
        thread = threading.Thread(target=lambda: children.append(start()))
        thread.start()
        thread.join()  # a child outlives the thread that started it
        time.sleep(0.5)
        print(*(child.pid for child in children if child.poll() is None), flush=True)
        time.sleep(600)
"""


@pytest.mark.parametrize("preload", [(), ("torch",)], ids=["interpreter", "fork"])
@pytest.mark.parametrize("how", ["sleep", "gil"])
def test_killed_parent_leaves_no_child(tmp_path: Path, preload: tuple[str, ...], how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    words = [sys.executable, str(script), str(ROOT), how, *preload]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(pids) == 2
    if how == "gil" and not preload:  # started by a thread that ended, it is left to its watching thread
        psutil.Process(pids.pop()).kill()
    wait_until(lambda: all(ended(pid) for pid in pids))
    wait_until(lambda: all(ended(p.pid) or p.name() == "sleep" for p in family))
    for grandchild in (p for p in family if not ended(p.pid)):
        grandchild.kill()


@pytest.mark.skipif(not fork_server.available(), reason="no pidfd")
def test_dead_fork_server_is_replaced(start: Any) -> None:
    first = start("echo", preload=("torch", "pyarrow"))
    server = psutil.Process(first.pid).parent()
    assert server is not None and server.num_threads() == 1, "a process with threads cannot be forked safely"
    server.kill()
    assert first.wait(20) == -signal.SIGKILL
    second = start("echo", 2, preload=("torch", "pyarrow"))
    assert second.channel.recv() == (2,)
    assert psutil.Process(second.pid).parent() != server


@pytest.mark.skipif(not fork_server.available(), reason="no pidfd")
def test_fork_server_survives_signals_to_the_group(start: Any) -> None:
    child = start("echo", preload=("torch",), ignore=(signal.SIGINT, signal.SIGTERM))
    server = psutil.Process(child.pid).parent()
    assert server is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        server.send_signal(number)
    other = start("exit_with", "exit", preload=("torch",))
    assert other.wait(20) == 3 and psutil.Process(child.pid).parent() == server


def test_without_fork_server_children_are_interpreters(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_FORK_SERVER", "0")
    child = start("echo", preload=("torch",))
    assert child.channel.recv() == () and psutil.Process(child.pid).ppid() == os.getpid()


def test_channel_carries_descriptors(tmp_path: Path) -> None:
    one, other = Channel.pair()
    with one, other, (tmp_path / "file").open("w+b") as file:
        one.send_with_fd({"n": 1}, file.fileno())
        one.send_with_fd("no descriptor")
        message, fd = other.receive_with_fd()
        assert message == {"n": 1} and fd is not None and os.write(fd, b"abc") == 3
        os.close(fd)
        assert (tmp_path / "file").read_bytes() == b"abc"
        assert other.receive_with_fd() == ("no descriptor", None)
        one.shutdown()
        with pytest.raises(EOFError):
            other.receive_with_fd()


def test_command_ends_with_its_parent(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, time
        from whorl.machine.process import start_command
        print(start_command(["sleep", "600"], cores=[min(__import__("os").sched_getaffinity(0))]).pid, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        wait_until(lambda: psutil.Process(pid).name() == "sleep")
        assert len(psutil.Process(pid).cpu_affinity()) == 1
        process.kill()
    wait_until(lambda: ended(pid))
    assert start_command([sys.executable, "-c", "raise SystemExit(4)"]).wait() == 4


def test_children_are_found_by_name(start: Any) -> None:
    child = start("echo", name="replica 1", preload=("torch",))
    child.channel.recv()
    assert [p.pid for p in children("replica")] == [child.pid]


def test_wait_names_a_stopped_child(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has not ended, and answers when it is continued. A wait for a busy child warns of nothing."""
    monkeypatch.setattr(process, "STOPPED_SECONDS", 0.05)
    child = start("echo", 1, name="replica 1")
    assert child.channel.recv() == (1,) and not child.is_stopped()
    assert wait_for([child.channel, child.sentinel], 0.2, [child]) == []
    os.kill(child.pid, signal.SIGSTOP)
    child.channel.send("late")
    with pytest.warns(RuntimeWarning, match=rf"replica 1 \(process {child.pid}\) is stopped.*kill -CONT"):
        assert wait_for([child.channel, child.sentinel], 0.2, [child]) == []
    os.kill(child.pid, signal.SIGCONT)
    assert wait_for([child.channel], None, [child]) == [child.channel] and child.channel.recv() == "late"
