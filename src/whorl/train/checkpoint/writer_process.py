"""The asynchronous checkpoint writer: a separate process, or a thread where memory cannot be shared.

A thread would share the GIL with the training loop. Hashing and writing release the GIL but take it between calls. At
low priority the writer may lose its core *while it holds the GIL*, and the loop then waits. An upload in Python (TLS,
retries) holds it for longer. A process has no lock in common and maps the staging buffer's pages.

Its priority is nice 10: about a tenth of a core when all are busy, a whole core when training waits. The work takes a
tenth of a core-second per GB, so this suffices. With SCHED_IDLE a busy machine would never finish a checkpoint.

It is a child process (`machine/process.py`): if the parent is killed, it leaves a `writing-` folder. It ignores SIGTERM and
SIGINT, which schedulers send to whole groups: it finishes its request and exits when the parent closes the channel.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import queue
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whorl.errors import LOST_HELPER, CheckpointError, DiskFullError
from whorl.machine.process import Channel, Child, Descriptor, wait_for
from whorl.train.checkpoint import writer

if TYPE_CHECKING:
    from whorl.train.checkpoint.remote import Uploader
    from whorl.train.checkpoint.staging import StagingBuffer

NICE = 10
Notify = Callable[[dict[str, Any]], None]


class WriterWorker:
    """Handles requests, in a process or a thread. `staged_bytes` returns the bytes of the staging buffer."""

    def __init__(self, staged_bytes: Callable[[int], memoryview], notify: Notify) -> None:
        self.staged_bytes, self.notify = staged_bytes, notify
        self.uploader: Uploader | None = None
        self.upload_thread: threading.Thread | None = None
        self.in_use: set[str] = set()

    def handle(self, request: dict[str, Any]) -> None:
        """Write a checkpoint, report the result, and upload it if requested."""
        began, used, step = time.monotonic(), time.thread_time(), int(request["index"]["step"])
        try:
            path = writer.write_checkpoint(
                Path(request["folder"]),
                request["index"],
                self.staged_bytes(int(request["size"])),
                keep=request["config"]["keep"],
                keep_seconds=request["config"]["keep_hours"] and request["config"]["keep_hours"] * 3600,
                in_use=self.in_use,
                piece=writer.Piece(*request["piece"]),
            )
        except (DiskFullError, CheckpointError) as error:
            self.notify({"tier": "local", "step": step, "error": error.what, "do": error.do,
                       "full": isinstance(error, DiskFullError)})  # fmt: skip
            return
        except Exception as error:  # an exception here would be lost
            self.notify({"tier": "local", "step": step, "error": f"{type(error).__name__}: {error}",
                       "do": "", "full": False})  # fmt: skip
            return
        self.notify({"tier": "local", "step": step, "seconds": time.monotonic() - began,
                   "cpu": time.thread_time() - used, "bytes": request["index"]["bytes"]})  # fmt: skip
        if request["upload"]:
            self._upload(request, path, step)

    def _upload(self, request: dict[str, Any], path: Path, step: int) -> None:
        if request["wait_for_upload"]:  # the last one before the end waits for earlier uploads
            self.finish()
        if self.upload_thread is not None and self.upload_thread.is_alive():
            self.notify({"tier": "remote", "step": step, "deferred": True})
            return
        from whorl.train.checkpoint.remote import Uploader
        from whorl.train.config import CheckpointConfig

        uploads = self.uploader = self.uploader or Uploader(
            CheckpointConfig.model_validate(request["config"]), request["job_id"], self.notify
        )
        self.in_use.add(path.name)

        def run() -> None:
            uploads.upload(path, step)
            self.in_use.discard(path.name)

        self.upload_thread = threading.Thread(target=run, daemon=True)
        self.upload_thread.start()

    def finish(self) -> None:
        """Wait for the upload in progress."""
        if self.upload_thread is not None:
            self.upload_thread.join()


class AsyncWriter:
    """The parent's side: one request at a time; replies arrive asynchronously.

    Args:
        staging: holds the bytes of a request; they may not change until its reply.
    """

    def __init__(self, staging: StagingBuffer, *, thread: bool = False) -> None:
        self.staging, self.process, self.thread = staging, None, None
        if thread or staging.fd < 0:
            self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
            self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
            self.thread = threading.Thread(target=self._serve, daemon=True, name="checkpoint writer")
            self.thread.start()
            return
        self.process = Child(
            "whorl.train.checkpoint.writer_process:serve_requests", Descriptor(staging.fd), name="checkpoints",
            preload=(__name__,), nice=NICE,
            ignore=(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
        )  # fmt: skip

    def _serve(self) -> None:
        worker = WriterWorker(lambda size: self.staging.view(0, size), self._answers.put)
        while (request := self._requests.get()) is not None:
            worker.handle(request)
        worker.finish()

    def submit(self, request: dict[str, Any]) -> None:
        """Start writing the contents of the staging buffer.

        Raises:
            CheckpointError: the writer has died.
        """
        request = {**request, "size": self.staging.size}
        if self.thread is not None:
            self._requests.put(request)
            return
        try:
            assert self.process is not None
            self.process.channel.send_bytes(json.dumps(request).encode())
        except OSError as error:
            raise self._writer_died() from error

    def poll_reply(self, timeout: float | None = 0.0) -> dict[str, Any] | None:
        """Return the next reply if it arrives within `timeout` seconds (None: no limit), else None.

        Raises:
            CheckpointError: the writer has died.
        """
        if self.thread is not None:
            try:
                return self._answers.get(timeout=timeout) if timeout else self._answers.get(timeout is None)
            except queue.Empty:
                return None
        assert self.process is not None
        try:
            if wait_for([self.process.channel], timeout, [self.process]):
                return dict(json.loads(self.process.channel.recv_bytes()))
        except (EOFError, OSError) as error:
            raise self._writer_died() from error
        return None

    def _writer_died(self) -> CheckpointError:
        assert self.process is not None
        self.process.wait(5)
        died = CheckpointError(
            f"the checkpoint writer died: {self.process.exit_description()}",
            do="run the same command again: it resumes from the last complete checkpoint",
        )
        died.exit_code = LOST_HELPER
        return died

    def close(self, timeout: float) -> bool:
        """Let the writer finish; after `timeout` seconds kill it. Return whether it finished."""
        if self.thread is not None:
            self._requests.put(None)
            self.thread.join(timeout)
            return not self.thread.is_alive()
        assert self.process is not None
        with contextlib.suppress(OSError):
            self.process.channel.send_bytes(b"")
        finished = self.process.wait(timeout) is not None
        self.process.close(0)
        return finished


def serve_requests(channel: Channel, area: int) -> None:
    """Main function of the process. area: descriptor of the staging buffer."""
    lock = threading.Lock()

    def notify(answer: dict[str, Any]) -> None:
        with lock, contextlib.suppress(OSError):
            channel.send_bytes(json.dumps(answer).encode())

    mapped: list[mmap.mmap] = []

    def content(size: int) -> memoryview:
        if not mapped or len(mapped[0]) != size:
            mapped[:] = [mmap.mmap(area, size, prot=mmap.PROT_READ)]
        return memoryview(mapped[0])

    worker = WriterWorker(content, notify)
    while request := channel.recv_bytes():
        worker.handle(json.loads(request))
    worker.finish()
