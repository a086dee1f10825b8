"""Prefill and decode processes of a disaggregated engine.

Messages over the channel (`serve/worker/disaggregated.py` is at the other end):

    to both       (role, make, threads), once; then ("abort", id)
    to prefill    ("read", request)                 -> ("read", id, positions found in its cache) + block
    to decode     ("write", request) [+ block]      -> ("taken", id), ("deltas", [...])
    from both     ("ready", positions of its cache, size of the vocabulary, positions of a sequence)
                  ("failed", error): the model cannot be loaded or served, and the process ends
                  ("refused", id, error)   ("unusable", id, error): of a block

A prefill process runs requests of one token and discards the token; it sends their pages. A decode process imports a block
in slices between its steps, so that the copy of a long prompt does not stall running requests. It compiles grammars in a
thread, and adds their requests afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Literal

from whorl.engine.disaggregation.kv_block import KVBlock
from whorl.engine.disaggregation.kv_transfer import (
    check_prefix_caching,
    export_pages,
    import_pages,
    model_fingerprint,
)
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling.grammar import compile_ahead
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import DataError, WhorlError
from whorl.machine.process import Channel

Role = Literal["prefill", "decode"]
EngineFactory = Callable[[Role], Engine]

PAGES_PER_STEP = 4  # pages imported between two steps
CHECKSUM_BYTES_PER_STEP = 4 << 20  # bytes checksummed between two steps: about a millisecond
COMPILE_POLL_SECONDS = 0.005  # of an idle process whose grammars are compiled


def run_worker(channel: Channel) -> None:
    """Main function of a worker: receives its role, then alternates messages and steps until the other end closes."""
    with suppress(EOFError, BrokenPipeError, ConnectionError):
        (role, make, threads), _ = channel.receive_with_fd()
        import torch

        torch.set_num_threads(threads)
        try:
            engine = make(role)
            check_prefix_caching(engine)
        except WhorlError as error:
            channel.send_with_fd(("failed", error))
            return
        model_fingerprint(engine)  # now, not during the first prompt
        n_cached = engine.cache.groups[0].pool.n_pages * engine.cache.page_size
        channel.send_with_fd(("ready", n_cached, engine.model.config.vocab_size, engine.max_positions))
        (_PrefillWorker if role == "prefill" else _DecodeWorker)(channel, engine).run()


class _WorkerLoop:
    def __init__(self, channel: Channel, engine: Engine) -> None:
        self.channel, self.engine = channel, engine

    def run(self) -> None:
        while True:
            while self.channel.poll(self.poll_seconds):
                message, fd = self.channel.receive_with_fd()
                self.handle(message, fd)
            self.step()

    @property
    def poll_seconds(self) -> float | None:
        """How long to wait for a message before the next step; None for any time."""
        return 0.0 if self.engine.busy else None

    def add(self, request: Request) -> bool:
        try:
            self.engine.add(request)
        except WhorlError as error:
            self.refuse(request, error)
            return False
        return True

    def refuse(self, request: Request, error: WhorlError) -> None:
        self.channel.send_with_fd(("refused", request.id, error))

    def handle(self, message: Any, fd: int | None) -> None: ...

    def step(self) -> None: ...


class _PrefillWorker(_WorkerLoop):
    """Runs prefill as requests of one token, which is discarded, and sends their pages."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.prefilling: dict[str, Request] = {}

    def handle(self, message: Any, fd: int | None) -> None:
        verb, payload = message
        if verb == "abort":
            self.engine.abort(payload)
            self.prefilling.pop(payload, None)
            return
        prefill_request = Request(
            id=payload.id, ids=payload.ids, sampling=SamplingParams(temperature=0), max_tokens=1, priority=payload.priority,
            client=payload.client
        )  # fmt: skip
        if self.add(prefill_request):
            self.prefilling[payload.id] = prefill_request

    def step(self) -> None:
        for delta in self.engine.step():
            request = self.prefilling.pop(delta.request_id, None)
            if request is not None:
                with export_pages(self.engine, request.ids) as block:
                    self.channel.send_with_fd(("read", request.id, delta.cached_tokens), block.fd)


class _DecodeWorker(_WorkerLoop):
    """Decodes, after importing the pages of a prompt."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.incoming_blocks: deque[tuple[Request, KVBlock]] = deque()
        # Of the first incoming block: positions imported, checksum complete.
        self.imported, self.verified = (-1, False)
        self.compiling: dict[str, tuple[Request, Future[Any]]] = {}
        self.grammar_thread = ThreadPoolExecutor(1, thread_name_prefix="whorl-grammar")

    @property
    def poll_seconds(self) -> float | None:
        if self.engine.busy or self.incoming_blocks:
            return 0.0
        return COMPILE_POLL_SECONDS if self.compiling else None

    def add(self, request: Request) -> bool:
        """Add a request; with a grammar, once that is compiled."""
        compile_grammar = self.engine.compile_grammar
        if request.grammar is None or compile_grammar is None:
            return super().add(request)
        compiled = self.grammar_thread.submit(compile_ahead, compile_grammar, request.grammar)
        self.compiling[request.id] = request, compiled
        return True

    def add_compiled(self) -> None:
        """Add the requests whose grammars are compiled; the engine finds the result while the future holds it."""
        for request, compiled in [pair for pair in self.compiling.values() if pair[1].done()]:
            del self.compiling[request.id]
            try:
                compiled.result()
            except WhorlError as error:
                self.refuse(request, error)
            else:
                super().add(request)

    def handle(self, message: Any, fd: int | None) -> None:
        verb, payload = message
        if verb == "abort":
            self.engine.abort(payload)
            if payload in self.compiling:
                self.compiling.pop(payload)[1].cancel()
            for request, block in [x for x in self.incoming_blocks if x[0].id == payload]:
                if request is self.incoming_blocks[0][0]:
                    self.imported, self.verified = -1, False
                self.incoming_blocks.remove((request, block))
                block.close()
        elif fd is None:
            self.add(payload)
        else:
            try:
                self.incoming_blocks.append((payload, KVBlock(fd, verify_checksum=False)))
            except DataError as error:
                self.reject_block(payload, error)

    def step(self) -> None:
        self.add_compiled()
        if self.incoming_blocks:
            self.import_slice(*self.incoming_blocks[0])
        if self.engine.busy and (deltas := self.engine.step()):
            self.channel.send_with_fd(("deltas", deltas))

    def import_slice(self, request: Request, block: KVBlock) -> None:
        """Import a slice of the block; after the last slice, add the request."""
        before, error = self.imported, None
        idle = not self.engine.busy  # no running request waits
        try:
            if not self.verified:
                self.verified = block.verify(None if idle else CHECKSUM_BYTES_PER_STEP)
                if not idle:
                    return
            self.imported = import_pages(self.engine, block, max_pages=None if idle else PAGES_PER_STEP)
        except DataError as rejected:
            error = rejected
        # If the cache is full, the missing positions are computed.
        if error is None and self.imported not in (before, block.n_positions):
            return
        self.imported, self.verified = -1, False
        self.incoming_blocks.popleft()
        block.close()
        if error is None:
            self.channel.send_with_fd(("taken", request.id))
            self.add(request)
        else:
            self.reject_block(request, error)

    def reject_block(self, request: Request, error: DataError) -> None:
        self.channel.send_with_fd(("unusable", request.id, error))
        self.add(request)
