"""The event loop in which environments step, with their verifiers and programs in batches.

    loop = EnvLoop(verify, sandbox)
    prompts = loop.reset_all(envs, tasks, seconds)       prompts, or a StepError with the reason
    loop.submit(key, env, messages, reply, seconds)      starts `env.step` in the loop's thread
    key, turn = loop.take(timeout=1.0)                   a Turn, or a StepError
    loop.flush()                                         runs the verifiers and programs that steps await

The loop has a separate thread, so the engine samples other rollouts meanwhile. A step that exceeds its limit is
cancelled. `verify` and `run` do not count, since they have separate limits and wait for their batch.

The subtle point is a step or reset that blocks the thread: no other can continue, and Python cannot stop it. `abandon`
then leaves the thread behind and reports every step in it as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from whorl.errors import ConfigError
from whorl.evals.episodes.config import EpisodeConfig, make_environment
from whorl.evals.episodes.environment import (
    Prompt,
    Reply,
    TextEnv,
    Turn,
    check_prompt,
    check_turn,
)
from whorl.evals.grading import Grade, VerifiableTask, grade_tasks, needs_sandbox
from whorl.evals.model.requests import Completion
from whorl.sandbox import Program, ProgramResult, Sandbox
from whorl.tokens.token_encoder import Message

VerifyBatch = Callable[[Sequence[VerifiableTask], Sequence[Completion]], Sequence[Grade]]
T = TypeVar("T")
POLL_SECONDS = 0.002  # between two looks for requests of steps while the engine is idle
GRACE_SECONDS = 1.0  # beyond a limit
BLOCKED = "{} ignores its limit: it blocks the event loop (use asyncio.to_thread) or is not cancellable"
_limit: ContextVar[asyncio.Timeout | None] = ContextVar("limit", default=None)


class ProgramSandbox(Protocol):
    """Runs programs, as a `Sandbox`."""

    def run_all(self, programs: Sequence[Program]) -> list[ProgramResult]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class StepError:
    """A step, reset or close that raised, took too long or returned a wrong type."""

    reason: str


@dataclass
class _Request:
    """A verification or a program that a step awaits."""

    item: tuple[VerifiableTask, Completion] | Program
    future: asyncio.Future[Any]


class EnvLoop:
    """See the top of this file. It implements `EnvServices`.

    Args:
        verify: returns the grades of a batch.
        sandbox: runs programs; None if no environment needs one.
    """

    def __init__(self, verify: VerifyBatch, sandbox: ProgramSandbox | None) -> None:
        self._verify, self._sandbox = verify, sandbox
        self._results: queue.SimpleQueue[tuple[int, Turn | StepError]] = queue.SimpleQueue()
        self.running: set[int] = set()
        self._requests: list[_Request] = []
        self._lock = threading.Lock()
        self._flusher: threading.Thread | None = None
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- in the thread of the rollout worker ---------------------------------------------------------------------------

    def submit(
        self, key: int, env: TextEnv, messages: Sequence[Message], reply: Reply, seconds: float | None
    ) -> None:
        """Start a step; `take` returns its result. key: unique. seconds: its limit."""
        self.running.add(key)
        self._call(self._step(key, env, messages, reply, seconds))

    def reset_all(
        self, envs: Sequence[TextEnv], tasks: Sequence[VerifiableTask], seconds: float | None
    ) -> list[Prompt | StepError]:
        """Start the rollouts of tasks and return their prompts, in order. seconds: limit of each."""
        calls = [partial(_reset, env, task) for env, task in zip(envs, tasks, strict=True)]
        return self._call_all("reset", calls, seconds)

    def close_all(self, envs: Sequence[TextEnv], seconds: float | None) -> list[StepError | None]:
        """Release what rollouts hold. seconds: limit of each."""
        return self._call_all("close", [env.close for env in envs], seconds)

    def take(self, timeout: float | None = None) -> tuple[int, Turn | StepError] | None:
        """Return one result, or None. timeout: seconds to wait.

        Raises:
            ConfigError: a batch of verifiers could not run.
        """
        if self._error is not None:
            raise self._error
        with contextlib.suppress(queue.Empty):
            while True:
                key, turn = self._results.get(timeout is not None, timeout)
                if key in self.running:  # else reported before, as blocked
                    self.running.remove(key)
                    return key, turn
        return None

    @property
    def awaits_flush(self) -> bool:
        """Whether every running step awaits a verifier or a program."""
        with self._lock:
            return len(self._requests) >= len(self.running) > 0

    def flush(self) -> None:
        """Run the waiting verifiers and programs in this thread, and resume their steps."""
        with self._lock:
            requests, self._requests = self._requests, []
        graded = [(r, r.item) for r in requests if not isinstance(r.item, Program)]
        programs = [(r, r.item) for r in requests if isinstance(r.item, Program)]
        results: list[Any] = []
        if graded:
            results += self._verify([task for _, (task, _) in graded], [done for _, (_, done) in graded])
        if programs:
            assert self._sandbox is not None
            results += self._sandbox.run_all([program for _, program in programs])
        for (request, _), result in zip([*graded, *programs], results, strict=True):
            loop = request.future.get_loop()
            with contextlib.suppress(RuntimeError):  # the loop was left behind
                loop.call_soon_threadsafe(_resolve, request.future, result)

    def start_flush(self) -> None:
        """Run `flush` in a thread, if something waits and no other flush runs."""
        if self._requests and (self._flusher is None or not self._flusher.is_alive()):
            self._flusher = threading.Thread(target=self._flush_in_thread, name="verifiers", daemon=True)
            self._flusher.start()

    @property
    def is_flushing(self) -> bool:
        """Whether a thread runs verifiers or programs."""
        return self._flusher is not None and self._flusher.is_alive()

    def abandon(self) -> None:
        """Report all running steps as failed and continue with a new loop, because steps ignore their limit."""
        self._stop_loop()
        for key in sorted(self.running):
            self._results.put((key, StepError(BLOCKED.format("step"))))

    def close(self) -> None:
        """Stop the loop and the sandbox."""
        self._stop_loop()
        if self._sandbox is not None:
            self._sandbox.close()

    def _stop_loop(self) -> None:
        loop, self._loop = self._loop, None
        with self._lock:
            self._requests = []
        if loop is not None:
            loop.call_soon_threadsafe(loop.stop)

    def _call(self, step: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=_run, args=(self._loop,), name="environments", daemon=True).start()
        asyncio.run_coroutine_threadsafe(step, self._loop)

    def _flush_in_thread(self) -> None:
        try:
            self.flush()
        except BaseException as error:
            self._error = error

    # -- in the loop's thread ------------------------------------------------------------------------------------------

    async def verify(self, task: VerifiableTask, completion: Completion) -> Grade:
        """Return the grade of a completion."""
        grade: Grade = await self._request((task, completion))
        return grade

    async def run(self, program: Program) -> ProgramResult:
        """Return the result of a program.

        Raises:
            ConfigError: the environment does not set `needs_sandbox`.
        """
        if self._sandbox is None:
            raise ConfigError("there is no sandbox", do="set needs_sandbox = True in the environment")
        result: ProgramResult = await self._request(program)
        return result

    async def _request(self, item: tuple[VerifiableTask, Completion] | Program) -> Any:
        loop, limit = asyncio.get_running_loop(), _limit.get()
        left = None
        if limit is not None and (when := limit.when()) is not None:
            left = when - loop.time()
            limit.reschedule(None)
        request = _Request(item, loop.create_future())
        with self._lock:
            self._requests.append(request)
        result = await request.future
        if limit is not None and left is not None:
            limit.reschedule(loop.time() + left)
        return result

    async def _step(
        self, key: int, env: TextEnv, messages: Sequence[Message], reply: Reply, seconds: float | None
    ) -> None:
        async def step() -> Turn:
            return check_turn(await env.step(messages, reply))

        self._results.put((key, await _limited("step", step, seconds)))

    def _call_all(
        self, what: str, calls: Sequence[Callable[[], Awaitable[T]]], seconds: float | None
    ) -> list[T | StepError]:
        """Return the results of `calls` in order, each of them run in the loop with its limit."""
        results: queue.SimpleQueue[tuple[int, T | StepError]] = queue.SimpleQueue()

        async def run(n: int, call: Callable[[], Awaitable[T]]) -> None:
            results.put((n, await _limited(what, call, seconds)))

        for n, call in enumerate(calls):
            self._call(run(n, call))
        found: dict[int, T | StepError] = {}
        progress = time.monotonic()
        while len(found) < len(calls):
            try:
                n, found_now = results.get(timeout=POLL_SECONDS)
                found[n] = found_now
            except queue.Empty:
                if self._requests:
                    self.flush()
                elif seconds is None or time.monotonic() - progress < seconds + GRACE_SECONDS:
                    continue
                else:
                    self._stop_loop()
                    break
            progress = time.monotonic()
        blocked = StepError(BLOCKED.format(what))
        return [found.get(n, blocked) for n in range(len(calls))]


async def _limited(what: str, call: Callable[[], Awaitable[T]], seconds: float | None) -> T | StepError:
    """Return the result of a call of foreign code, or its error."""
    try:
        async with asyncio.timeout(seconds) as limit:
            _limit.set(limit)
            return await call()
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        if isinstance(error, TimeoutError) and limit.expired():
            return StepError(f"{what} took longer than {seconds:g} s")
        return StepError(f"{what}: {type(error).__name__}: {error}".splitlines()[0])


async def _reset(env: TextEnv, task: VerifiableTask) -> Prompt:
    prompt = env.reset(task)
    return check_prompt(await prompt if inspect.isawaitable(prompt) else prompt)


def make_env_loop(
    environment: EpisodeConfig | None,
    tasks: Sequence[VerifiableTask],
    verify: VerifyBatch | None = None,
    *,
    sandbox_workers: int | None = None,
) -> EnvLoop:
    """Return a loop with a sandbox if the environment or a task's verifier runs programs.

    verify: replaces the verifiers of the tasks. sandbox_workers: None uses all cores.
    """
    env = make_environment(environment, EnvLoop(grade_tasks, None))
    sandbox = None
    if env.needs_sandbox or (verify is None and needs_sandbox(tasks)):
        sandbox = Sandbox() if sandbox_workers is None else Sandbox(workers=sandbox_workers)
    return EnvLoop(verify or partial(grade_tasks, sandbox=sandbox), sandbox)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)  # steps of a stopped run
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_SECONDS))
    finally:
        for task in asyncio.all_tasks(loop):  # that cannot be cancelled: asyncio would print each of them
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)
