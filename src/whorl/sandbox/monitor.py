"""Monitor the processes of one program: their output, frames, usage, deadline, and the parent's end.

The monitor kills; it trusts nothing that it reads. A reason of the monitor takes precedence over every report.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import time
from pathlib import Path
from typing import Any

from whorl.sandbox import work_folder as folder

POLL_SECONDS = 0.02  # smallest interval of the checks of files and threads
USAGE_SHARE = 0.2  # largest share of time spent in those checks
REPORT_EXTRA_BYTES = 64 << 10  # maximum frame size beyond the output limit


class Monitor:
    """See the top of this file.

    Args:
        limits: fields of `ResourceLimits`.
        work_folder: the program's folder.
        output: descriptor of the program's output, which must not block.

    Attributes:
        reason: the limit that was exceeded, or "".
        output: what was printed, up to the limit.
    """

    def __init__(self, limits: dict[str, Any], work_folder: Path, output: int) -> None:
        self.limits, self.folder, self.output_fd = limits, work_folder, output
        self.deadline = time.monotonic() + limits["wall_seconds"]
        self.reason, self.output = "", bytearray()
        self.pids: list[int] = []  # the program's first
        self._polls_usage = limits["file_bytes"] > 0 or limits["processes"] > 1
        self._next_check = time.monotonic() + POLL_SECONDS

    def read_frame(self, descriptor: int, writer: int = -1, to_send: bytes = b"") -> bytes | None:
        """Return the next frame from a pipe that must not block; None if it ended or a limit was exceeded.

        Args:
            descriptor: the pipe.
            writer: pipe to which `to_send` is written meanwhile.
            to_send: a frame.
        """
        received = bytearray()
        poll = self._poll(descriptor)
        if to_send:
            poll.register(writer, select.POLLOUT)
        most = self.limits["output_bytes"] + REPORT_EXTRA_BYTES
        while self._wait(poll, exclude=descriptor):
            if to_send:
                try:
                    to_send = to_send[os.write(writer, to_send) :]
                except BlockingIOError:
                    pass
                except BrokenPipeError:
                    to_send = b""
                if not to_send:
                    poll.unregister(writer)
            with contextlib.suppress(BlockingIOError):
                part = os.read(descriptor, 1 << 16)
                if not part:
                    return None
                received += part
            size = 4 + int.from_bytes(received[:4], "little")
            if len(received) > most + 4 or (len(received) >= 4 and size > most + 4):
                self.reason = "output"
            elif len(received) >= 4 and len(received) >= size:
                return bytes(received[4:size])
        return None

    def wait_end(self, pid: int) -> None:
        """Wait until a process ended or a limit was exceeded."""
        process = os.pidfd_open(pid)
        poll = self._poll(process)
        while not self.reason and not self._ended(pid):
            self._wait(poll, exclude=process)
        os.close(process)

    def kill_all(self) -> list[tuple[int, Any]]:
        """Kill and reap the processes, and return (wait status, resource usage) of each."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)  # not reaped yet, so the pid is still this process's
        ends = [os.wait4(pid, 0)[1:] for pid in self.pids]
        self.pids = []
        while self._read_output():
            pass
        return ends

    def _ended(self, pid: int) -> bool:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def _poll(self, descriptor: int) -> select.poll:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.register(self.output_fd, select.POLLIN)
        poll.register(0, 0)  # only the parent's end raises an event
        return poll

    def _wait(self, poll: select.poll, exclude: int) -> bool:
        """Wait for one event, and return False if a limit was exceeded."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            self.reason = self.reason or "time"
        if self.reason:
            return False
        wait = min(remaining, POLL_SECONDS) if self._polls_usage else remaining
        for descriptor, _ in poll.poll(wait * 1000 + 0.999):
            if descriptor == 0:
                self.kill_all()
                raise EOFError
            if descriptor == self.output_fd and not self._read_output():
                with contextlib.suppress(KeyError):
                    poll.unregister(descriptor)
        if self._polls_usage:
            self._check_usage()
        return not self.reason

    def _read_output(self) -> bool:
        """Read available output; return False at its end."""
        try:
            data = os.read(self.output_fd, 1 << 16)
        except BlockingIOError:
            return False
        self.output += data
        if len(self.output) > self.limits["output_bytes"]:
            del self.output[self.limits["output_bytes"] :]
            self.reason = self.reason or "output"
        return bool(data)

    def _check_usage(self) -> None:
        began = time.monotonic()
        if began < self._next_check:
            return
        most = self.limits["file_bytes"]
        if most and folder.used_bytes(self.folder, most) + self._unlinked_bytes() > most:
            self.reason = "files"
        with contextlib.suppress(OSError, IndexError):
            threads = int(Path(f"/proc/{self.pids[0]}/stat").read_text().rpartition(")")[2].split()[17])
            if threads > self.limits["processes"]:
                self.reason = "threads"
        took = time.monotonic() - began
        self._next_check = began + max(POLL_SECONDS, took / USAGE_SHARE)

    def _unlinked_bytes(self) -> int:
        """Return the size of open files that have no name any more. At most 64 descriptors are open."""
        sizes: dict[tuple[int, int], int] = {}
        for pid in self.pids:
            with contextlib.suppress(OSError):
                for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
                    with contextlib.suppress(OSError):
                        found = os.stat(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH116
                        if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                            sizes[found.st_dev, found.st_ino] = found.st_size
        return sum(sizes.values())
