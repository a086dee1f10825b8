"""The engine in a separate thread: commands enter through a queue, deltas of each step go to the event loop.

    event loop                                   engine thread
    submit(request) -> Stream    -- queue -->    engine.add
    stream.admitted()            <-- loop --     admitted, or the error of the rejection
    stream.next() -> Delta       <-- loop --     engine.step(): one callback per step for all sequences
    stream.close()               -- queue -->    engine.abort
    call(function)               -- queue -->    function(engine), between two steps
    compute(client, pieces)      -- queue -->    one piece after another, between two steps

Only this thread touches the engine, so the engine needs no locks. `call` runs any short function between two steps, such as
a read of statistics. `compute` is for work that takes longer than a step, such as an embedding. While sequences run, its
pieces get `JOB_SHARE` of the time of the steps, so that streams keep half of their speed, and clients take turns.

The engine thread never waits for a slow reader. Unread deltas of a stream are merged into *one*, whose size is bounded by
the output length. The response writer drops a reader that stalls. A stream that is closed early is aborted: its pages are
free before the next step, and later deltas of it are dropped.

An exception in a step is a bug: every stream fails, `error` holds the exception, and no request is admitted any more. The
process stays up so that monitoring can query it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol, TypeVar

from whorl.engine.request import Alternatives, Delta, FinishReason, Request, Token
from whorl.errors import ProducerError
from whorl.serve.worker.fair_queue import FairQueue

LOG = logging.getLogger("whorl.serve")
T = TypeVar("T")
JOB_SHARE = 0.75  # of the time of the steps


class EngineProtocol(Protocol):
    """The methods of an engine that the worker calls; `engine.Engine` implements them.

    An engine that passes requests to other processes has a dictionary `errors`: `add` returns before the request is
    admitted, and a later delta with "abort" has its reason there. Its first delta admits a request.
    """

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Delta]: ...
    def abort(self, request_id: str) -> bool: ...


class Stream:
    """One running sequence, as its reader sees it. All times are `time.perf_counter()`."""

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self.submit_time = time.perf_counter()
        self.first_token_time = self.last_token_time = (
            0.0  # times of the first and the latest token; 0: no token yet
        )
        self.n_tokens = self.cached_tokens = 0  # n_tokens: generated, without the forced prefix
        self.finish: FinishReason | None = None
        self.closed = False
        self._worker = worker
        self._tokens: list[Token] = []
        self._n_forced = 0  # of `_tokens`
        self._text = bytearray()
        self._abort_reason = ""
        self._prompt_log_probs: list[float] = []
        self._prompt_alternatives: list[Alternatives] = []
        self._has_output = False
        self._event = asyncio.Event()
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: BaseException | None = None

    async def admitted(self) -> None:
        """Wait until the engine has admitted the request. Raises the error of a rejection."""
        await asyncio.shield(self._admitted)

    async def next(self) -> Delta:
        """Wait for new output and return all of it since the last call. The last delta has a `finish_reason`.

        Raises:
            RuntimeError: the engine failed, or the worker was stopped.
        """
        while not self._has_output:
            if self._error is not None:
                raise self._error
            self._event.clear()
            await self._event.wait()
        delta = Delta(
            self.request.id,
            tuple(self._tokens),
            bytes(self._text),
            None if self._error is not None else self.finish,
            self.cached_tokens,
            tuple(self._prompt_log_probs),
            self._n_forced,
            self._abort_reason,
            prompt_alternatives=tuple(self._prompt_alternatives),
        )
        self._n_forced = 0
        self._tokens.clear()
        self._text.clear()
        self._prompt_log_probs.clear()
        self._prompt_alternatives.clear()
        self._has_output = False
        return delta

    def close(self) -> None:
        """Abort the sequence if it still runs. A second call, or a call after the end, has no effect."""
        if not self.closed:
            self.closed = True
            self._worker._abort_stream(self)

    def end_with_error(self, error: Exception) -> None:
        """End the sequence from the server's side: its reader gets the available output, then the error."""
        if not self.closed:
            self.close()
            self._fail(error)

    def _push(self, delta: Delta, now: float) -> None:
        if delta.tokens:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
            self.n_tokens += len(delta.tokens) - delta.n_forced
            self._n_forced += delta.n_forced
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish, self._abort_reason = delta.finish_reason, delta.error
        self._tokens += delta.tokens
        self._text += delta.text
        self._prompt_log_probs += delta.prompt_log_probs
        self._prompt_alternatives += delta.prompt_alternatives
        self._has_output = True
        self._event.set()

    def _mark_admitted(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if not self._admitted.done():
            self._admitted.set_exception(error)
            self._admitted.exception()  # marks the exception as retrieved, in case no task awaits it
        self._event.set()


class _Job:
    """A generator with its result, as `EngineWorker.compute` runs it."""

    def __init__(self, pieces: Generator[None, None, Any]) -> None:
        self.pieces, self.future = pieces, Future[Any]()

    def run_piece(self) -> bool:
        """Run until the next `yield`. Returns False at the end, or if the caller was cancelled."""
        try:
            if self.future.cancelled():
                self.pieces.close()
                return False
            next(self.pieces)
            return True
        except StopIteration as end:
            result, error = end.value, None
        except BaseException as problem:
            result, error = None, problem
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(result) if error is None else self.future.set_exception(error)
        return False


class EngineWorker:
    """The thread of an engine.

    Args:
        engine: used only by the thread after `start`.
        on_finish: called in the event loop once per stream, when it ends or is closed (metrics).
    """

    def __init__(
        self, engine: EngineProtocol, on_finish: Callable[[Stream], None] = lambda stream: None
    ) -> None:
        self.engine, self.on_finish = engine, on_finish
        self.error: BaseException | None = None
        self.streams: dict[str, Stream] = {}  # used only in the event loop
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: FairQueue[_Job] = FairQueue()
        self._job: _Job | None = None  # begun and not ended
        self._job_seconds = 0.0  # that pieces may take now; negative after a long one
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Sequences without a token."""
        return sum(not stream.first_token_time for stream in self.streams.values())

    @property
    def running(self) -> int:
        """Sequences with at least one token."""
        return len(self.streams) - self.waiting

    def start(self) -> None:
        """Start the thread. Called inside the event loop that it serves."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="whorl-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the current step; streams that still wait fail."""
        if self._thread is None:
            return
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 1.0)
        self._thread = None
        self._fail_all(RuntimeError("the server was stopped"))

    async def wait_drained(self) -> None:
        """Wait until no stream is left."""
        await self._idle.wait()

    def submit(self, request: Request) -> Stream:
        """Send `request` to the engine and return its stream; `Stream.admitted` reports the result."""
        stream = Stream(self, request)
        if self.error is not None:
            stream._fail(RuntimeError("the engine failed"))
            return stream
        self.streams[request.id] = stream
        self._idle.clear()
        self._commands.put(lambda: self._add(stream))
        return stream

    async def call(self, function: Callable[[Any], T]) -> T:
        """Run `function(engine)` in the engine thread between two steps; return its result or raise its exception."""
        if self.error is not None or self._thread is None:
            raise RuntimeError("the engine is not running")
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except BaseException as error:
                    future.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    async def compute(self, client: str, pieces: Generator[None, None, T]) -> T:
        """Run a generator in the engine thread, a piece at a time; return its value or raise its exception.

        One job runs to its end before the next begins, so that only one holds its memory.
        """
        if self.error is not None or self._thread is None:
            raise RuntimeError("the engine is not running")
        job = _Job(pieces)
        self._jobs.put(client, job)
        self._commands.put(lambda: None)  # wakes the thread
        found: T = await asyncio.wrap_future(job.future)
        return found

    # The following methods run in the engine thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._run_commands():
                    return
                began = time.perf_counter()
                deltas = self.engine.step() if self.engine.busy else []
                now = time.perf_counter()
            except BaseException as error:  # a panic of a library in Rust is no Exception
                LOG.error("the engine failed", exc_info=error)
                self.error = error
                self._call_in_loop(lambda: self._fail_all(RuntimeError("the engine failed")))
                self._fail_jobs()
                return
            if deltas:
                found = getattr(self.engine, "errors", None) or {}
                errors = {d.request_id: found.pop(d.request_id) for d in deltas if d.request_id in found}
                self._call_in_loop(partial(self._deliver, deltas, now, errors))
            self._run_jobs(now - began)

    def _run_commands(self) -> bool:
        """Run the commands that are queued now; block while there is nothing to do. Returns False to end the thread."""
        for _ in range(max(1, self._commands.qsize())):  # not those that arrive meanwhile: a step is due
            try:
                command = self._commands.get(block=not (self.engine.busy or self._job or self._jobs))
            except queue.Empty:
                return True
            if command is None:
                self._fail_jobs()
                return False
            command()
        return True

    def _run_jobs(self, step_seconds: float) -> None:
        """Run pieces of jobs: for a share of the last step's time, or one piece while no sequence runs."""
        self._job_seconds = (
            min(self._job_seconds, 0.0) + JOB_SHARE * step_seconds if self.engine.busy else 1e-9
        )
        while self._job_seconds > 0 and (self._job or self._jobs):
            began = time.perf_counter()
            self._job = self._job or self._jobs.pop()
            if self._job is not None and not self._job.run_piece():
                self._job = None
            self._job_seconds -= time.perf_counter() - began

    def _fail_jobs(self) -> None:
        while (job := self._job or self._jobs.pop()) is not None:
            self._job = None
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(RuntimeError("the engine stopped"))

    def _add(self, stream: Stream) -> None:
        if stream.closed:  # closed before it was added
            return
        try:
            self.engine.add(stream.request)
        except BaseException as error:
            self._call_in_loop(lambda error=error: self._reject(stream, error))  # type: ignore[misc]
        else:
            if not hasattr(self.engine, "errors"):
                self._call_in_loop(stream._mark_admitted)

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def _call_in_loop(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed, so that no stream can be notified
            LOG.debug("the event loop is closed")

    # The following methods run in the event loop.

    def _deliver(self, deltas: Sequence[Delta], now: float, errors: Mapping[str, Exception]) -> None:
        for delta in deltas:
            stream = self.streams.get(delta.request_id)
            if stream is None or stream.closed:
                continue
            if (error := errors.get(delta.request_id)) is not None:
                # A dead process is no fault of the client: status 500, not 400.
                internal = isinstance(error, ProducerError)
                self._reject(stream, RuntimeError(str(error)) if internal else error)
                continue
            stream._mark_admitted()
            stream._push(delta, now)
            if delta.finish_reason is not None:
                stream.closed = True
                self._remove_stream(stream)

    def _reject(self, stream: Stream, error: BaseException) -> None:
        stream.closed = True
        stream._fail(error)
        self._remove_stream(stream)

    def _abort_stream(self, stream: Stream) -> None:
        stream.finish = "abort"
        self._commands.put(lambda: self._abort(stream.request.id))
        self._remove_stream(stream)

    def _remove_stream(self, stream: Stream) -> None:
        if self.streams.pop(stream.request.id, None) is not None:
            self.on_finish(stream)
        if not self.streams:
            self._idle.set()

    def _fail_all(self, error: BaseException) -> None:
        for stream in list(self.streams.values()):
            self._reject(stream, error)
