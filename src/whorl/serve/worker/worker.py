"""The engine in a thread of its own: commands go in through a queue, what each step gave comes out to the event loop.

    event loop                                   engine's thread
    submit(request) -> Stream    -- queue -->    engine.add
    stream.admitted()            <-- loop --     taken, or the error that says why not
    stream.next() -> Delta       <-- loop --     engine.step(): one hand-over a step, whatever the number of sequences
    stream.close()               -- queue -->    engine.abort
    call(function)               -- queue -->    function(engine), between two steps

The engine belongs to its thread: nothing else touches it, so it needs no locks, and between two steps anything may be
asked of it (new weights, its statistics, an embedding).

The subtle part is the slow reader. The engine's thread never waits for one: it hands over and goes on. What a stream has
not taken yet is *one* merged delta, which grows with the answer and so is bounded by the answer's length, which was
bounded when the request was admitted. A reader who takes nothing for long is let go by whoever writes to it. A stream
that is closed early is aborted and its pages are free before the next step; what the engine says of it after that is
dropped.

A step that raises is a bug: every stream is told, `failed` says so, and nothing more is admitted. The process stays up so
that whoever watches it can ask why.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from whorl.engine.request import Delta, FinishReason, Request, Token

LOG = logging.getLogger("whorl.serve")
T = TypeVar("T")


class EngineProtocol(Protocol):
    """What is asked of an engine: `engine.Engine` is one."""

    @property
    def busy(self) -> bool: ...
    def add(self, request: Request) -> None: ...
    def step(self) -> list[Delta]: ...
    def abort(self, request_id: str) -> bool: ...


class Stream:
    """One sequence on its way, as its reader sees it. All times are `time.perf_counter()`."""

    def __init__(self, worker: EngineWorker, request: Request) -> None:
        self.request = request
        self.submit_time = time.perf_counter()
        self.first_token_time = self.last_token_time = (
            0.0  # when its first and newest tokens came; 0: not yet
        )
        self.n_tokens = self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.closed = False
        self._worker = worker
        self._tokens: list[Token] = []
        self._text = bytearray()
        self._prompt_log_probs: list[float] = []
        self._has_output = False
        self._event = asyncio.Event()
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: BaseException | None = None

    async def admitted(self) -> None:
        """Returns once the engine has taken the request; raises why it did not."""
        await asyncio.shield(self._admitted)

    async def next(self) -> Delta:
        """All that is new since the last call; waits for something. The one with `finish` is the last.

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
            self.finish,
            self.cached_tokens,
            tuple(self._prompt_log_probs),
        )
        self._tokens.clear()
        self._text.clear()
        self._prompt_log_probs.clear()
        self._has_output = False
        return delta

    def close(self) -> None:
        """No more is wanted. Aborts what still runs; calling it again, or after the end, does nothing."""
        if not self.closed:
            self.closed = True
            self._worker._abort_stream(self)

    def truncate(self) -> None:
        """Ended from this side: its reader gets what there is, and an end as if the tokens had run out."""
        if not self.closed:
            self.closed, self._has_output = True, True
            self._worker._abort_stream(self)
            self.finish = "length"
            self._event.set()

    def _push(self, delta: Delta, now: float) -> None:
        if delta.tokens:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
            self.n_tokens += len(delta.tokens)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.finish = delta.finish_reason
        self._tokens += delta.tokens
        self._text += delta.text
        self._prompt_log_probs += delta.prompt_log_probs
        self._has_output = True
        self._event.set()

    def _mark_admitted(self) -> None:
        if not self._admitted.done():
            self._admitted.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        if not self._admitted.done():
            self._admitted.set_exception(error)
            self._admitted.exception()  # looked at: nobody may be waiting
        self._event.set()


class EngineWorker:
    """An engine's thread.

    Args:
        engine: belongs to the thread from `start` on.
        ended: told each stream once, when it ends or is left, in the event loop (metrics).
    """

    def __init__(
        self, engine: EngineProtocol, on_finish: Callable[[Stream], None] = lambda stream: None
    ) -> None:
        self.engine, self.on_finish = engine, on_finish
        self.error: BaseException | None = None
        self.streams: dict[str, Stream] = {}  # the event loop's
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def waiting(self) -> int:
        """Sequences that have no token yet."""
        return sum(not stream.first_token_time for stream in self.streams.values())

    @property
    def running(self) -> int:
        """Sequences that have begun."""
        return len(self.streams) - self.waiting

    def start(self) -> None:
        """From inside of the event loop that it will serve."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="whorl-engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Ends the thread after the step it is in; whoever still waits is told."""
        if self._thread is None:
            return
        self._commands.put(None)
        while self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, 1.0)
        self._thread = None
        self._fail_all(RuntimeError("the server stops"))

    async def wait_drained(self) -> None:
        """Returns once no stream is left."""
        await self._idle.wait()

    def submit(self, request: Request) -> Stream:
        """Hands `request` to the engine; `Stream.admitted` says what it made of it."""
        stream = Stream(self, request)
        if self.error is not None:
            stream._fail(RuntimeError("the engine failed"))
            return stream
        self.streams[request.id] = stream
        self._idle.clear()
        self._commands.put(lambda: self._add(stream))
        return stream

    async def call(self, function: Callable[[Any], T]) -> T:
        """`function(engine)` between two steps, in the engine's thread; what it raises is raised here."""
        if self.error is not None or self._thread is None:
            raise RuntimeError("the engine does not run")
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.engine))
                except BaseException as error:
                    future.set_exception(error)

        self._commands.put(run)
        return await asyncio.wrap_future(future)

    # In the engine's thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._run_commands():
                    return
                deltas = self.engine.step()
                now = time.perf_counter()
            except Exception as error:
                LOG.error("the engine failed", exc_info=error)
                self.error = error
                self._call_in_loop(lambda: self._fail_all(RuntimeError("the engine failed")))
                return
            if deltas:
                self._call_in_loop(lambda deltas=deltas, now=now: self._deliver(deltas, now))  # type: ignore[misc]

    def _run_commands(self) -> bool:
        """Does what was asked for; waits for something to do while the engine is idle. False: leave."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.busy)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _add(self, stream: Stream) -> None:
        if stream.closed:  # left before its turn came
            return
        try:
            self.engine.add(stream.request)
        except Exception as error:
            self._call_in_loop(lambda error=error: self._reject(stream, error))  # type: ignore[misc]
        else:
            self._call_in_loop(stream._mark_admitted)

    def _abort(self, request_id: str) -> None:
        self.engine.abort(request_id)

    def _call_in_loop(self, function: Callable[[], Any]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            LOG.debug("the event loop is gone")

    # In the event loop.

    def _deliver(self, deltas: Sequence[Delta], now: float) -> None:
        for delta in deltas:
            stream = self.streams.get(delta.request_id)
            if stream is None or stream.closed:
                continue
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
