"""The two halves of an engine, each in a process: one reads prompts in, the other writes the answers.

What is said over the channel (`disaggregate.py` is at its other end):

    to both       (role, make, threads), once; then ("abort", id)
    to prefill    ("read", request)                 -> ("read", id, positions it had found itself) + block
    to decode     ("write", request) [+ block]      -> ("taken", id), ("deltas", [...])
    from both     ("ready", positions of its cache)   ("refused", id, error)   ("unusable", id, error): of a block

A prefill process serves requests of one token, which it throws away: their pages are what is wanted. A decoder takes a block
in by slices, between its steps, so that those who are being answered do not wait for the copy of a long prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

from whorl.engine.disaggregation.channel import Channel
from whorl.engine.disaggregation.kv_transfer import KVBlock, export_pages, import_pages, model_fingerprint
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import DataError, WhorlError

Role = Literal["prefill", "decode"]
EngineFactory = Callable[[Role], Engine]

PAGES_PER_STEP = 4  # pages taken in between two steps
CHECKSUM_BYTES_PER_STEP = 4 << 20  # bytes whose checksum is made between two steps: a millisecond


def run_worker(channel: Channel) -> None:
    """A process's life: told what to be, then one message and one step after another until the other end is gone."""
    with suppress(EOFError, BrokenPipeError, ConnectionError):
        (role, make, threads), _ = channel.receive()
        import torch

        torch.set_num_threads(threads)
        engine = make(role)
        model_fingerprint(engine)  # now, not under the first prompt
        channel.send(("ready", engine.cache.groups[0].pool.n_pages * engine.cache.page_size))
        (_PrefillWorker if role == "prefill" else _DecodeWorker)(channel, engine).run()


class _WorkerLoop:
    def __init__(self, channel: Channel, engine: Engine) -> None:
        self.channel, self.engine = channel, engine

    def run(self) -> None:
        while True:
            while self.channel.poll(0 if self.busy else None):
                message, fd = self.channel.receive()
                self.handle(message, fd)
            self.step()

    @property
    def busy(self) -> bool:
        return self.engine.busy

    def add(self, request: Request) -> bool:
        try:
            self.engine.add(request)
        except WhorlError as error:
            self.channel.send(("refused", request.id, error))
            return False
        return True

    def handle(self, message: Any, fd: int | None) -> None: ...

    def step(self) -> None: ...


class _PrefillWorker(_WorkerLoop):
    """Reads prompts in. A request of one token is one: the token is thrown away, the pages are what is wanted."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.prefilling: dict[str, Request] = {}

    def handle(self, message: Any, fd: int | None) -> None:
        verb, what = message
        if verb == "abort":
            self.engine.abort(what)
            self.prefilling.pop(what, None)
            return
        plain = Request(
            id=what.id, ids=what.ids, sampling=SamplingParams(temperature=0), max_tokens=1, priority=what.priority,
            client=what.client
        )  # fmt: skip
        if self.add(plain):
            self.prefilling[what.id] = plain

    def step(self) -> None:
        for delta in self.engine.step():
            request = self.prefilling.pop(delta.request_id, None)
            if request is not None:
                with export_pages(self.engine, request.ids) as block:
                    self.channel.send(("read", request.id, delta.cached_tokens), block.fd)


class _DecodeWorker(_WorkerLoop):
    """Writes answers."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.incoming_blocks: deque[tuple[Request, KVBlock]] = deque()
        self.imported, self.verified = -1, False  # of the first of them: positions; whether it is whole

    @property
    def busy(self) -> bool:
        return self.engine.busy or bool(self.incoming_blocks)

    def handle(self, message: Any, fd: int | None) -> None:
        verb, what = message
        if verb == "abort":
            self.engine.abort(what)
            for request, block in [x for x in self.incoming_blocks if x[0].id == what]:
                if request is self.incoming_blocks[0][0]:
                    self.imported, self.verified = -1, False
                self.incoming_blocks.remove((request, block))
                block.close()
        elif fd is None:
            self.add(what)
        else:
            try:
                self.incoming_blocks.append((what, KVBlock(fd, verify_checksum=False)))
            except DataError as error:
                self.reject_block(what, error)

    def step(self) -> None:
        if self.incoming_blocks:
            self.import_slice(*self.incoming_blocks[0])
        if self.engine.busy and (deltas := self.engine.step()):
            self.channel.send(("deltas", deltas))

    def import_slice(self, request: Request, block: KVBlock) -> None:
        """A slice more of the block; behind the last one the request begins."""
        before, error = self.imported, None
        idle = not self.engine.busy  # then nobody waits for us
        try:
            if not self.verified:
                self.verified = block.verify(None if idle else CHECKSUM_BYTES_PER_STEP)
                if not idle:
                    return
            self.imported = import_pages(self.engine, block, max_pages=None if idle else PAGES_PER_STEP)
        except DataError as refusal:
            error = refusal
        # Where there is no room for more, what is missing will be computed
        if error is None and self.imported not in (before, block.n_positions):
            return
        self.imported, self.verified = -1, False
        self.incoming_blocks.popleft()
        block.close()
        if error is None:
            self.channel.send(("taken", request.id))
            self.add(request)
        else:
            self.reject_block(request, error)

    def reject_block(self, request: Request, error: DataError) -> None:
        self.channel.send(("unusable", request.id, error))
        self.add(request)
