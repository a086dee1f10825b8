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
from whorl.engine.disaggregation.kv_transfer import PageBlock, export_pages, fingerprint, import_pages
from whorl.engine.engine import Engine
from whorl.engine.request import Request
from whorl.engine.sampling_params import Sampling
from whorl.errors import DataError, WhorlError

Role = Literal["prefill", "decode"]
Make = Callable[[Role], Engine]

SLICE = 4  # pages taken in between two steps
CHECKED = 4 << 20  # bytes whose checksum is made between two steps: a millisecond


def work(channel: Channel) -> None:
    """A process's life: told what to be, then one message and one step after another until the other end is gone."""
    with suppress(EOFError, BrokenPipeError, ConnectionError):
        (role, make, threads), _ = channel.receive()
        import torch

        torch.set_num_threads(threads)
        engine = make(role)
        fingerprint(engine)  # now, not under the first prompt
        channel.send(("ready", engine.cache.groups[0].pool.n_pages * engine.cache.page_size))
        (_Prefill if role == "prefill" else _Decode)(channel, engine).run()


class _Work:
    def __init__(self, channel: Channel, engine: Engine) -> None:
        self.channel, self.engine = channel, engine

    def run(self) -> None:
        while True:
            while self.channel.ready(0 if self.busy else None):
                message, fd = self.channel.receive()
                self.obey(message, fd)
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

    def obey(self, message: Any, fd: int | None) -> None: ...

    def step(self) -> None: ...


class _Prefill(_Work):
    """Reads prompts in. A request of one token is one: the token is thrown away, the pages are what is wanted."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.requests: dict[str, Request] = {}

    def obey(self, message: Any, fd: int | None) -> None:
        verb, what = message
        if verb == "abort":
            self.engine.abort(what)
            self.requests.pop(what, None)
            return
        plain = Request(
            id=what.id, ids=what.ids, sampling=Sampling(temperature=0), max_tokens=1, priority=what.priority,
            client=what.client
        )  # fmt: skip
        if self.add(plain):
            self.requests[what.id] = plain

    def step(self) -> None:
        for delta in self.engine.step():
            request = self.requests.pop(delta.request_id, None)
            if request is not None:
                with export_pages(self.engine, request.ids) as block:
                    self.channel.send(("read", request.id, delta.cached), block.fd)


class _Decode(_Work):
    """Writes answers."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        super().__init__(channel, engine)
        self.arrived: deque[tuple[Request, PageBlock]] = deque()
        self.taken_in, self.checked = -1, False  # of the first of them: positions; whether it is whole

    @property
    def busy(self) -> bool:
        return self.engine.busy or bool(self.arrived)

    def obey(self, message: Any, fd: int | None) -> None:
        verb, what = message
        if verb == "abort":
            self.engine.abort(what)
            for request, block in [x for x in self.arrived if x[0].id == what]:
                if request is self.arrived[0][0]:
                    self.taken_in, self.checked = -1, False
                self.arrived.remove((request, block))
                block.close()
        elif fd is None:
            self.add(what)
        else:
            try:
                self.arrived.append((what, PageBlock(fd, check=False)))
            except DataError as error:
                self.unusable(what, error)

    def step(self) -> None:
        if self.arrived:
            self.take_in(*self.arrived[0])
        if self.engine.busy and (deltas := self.engine.step()):
            self.channel.send(("deltas", deltas))

    def take_in(self, request: Request, block: PageBlock) -> None:
        """A slice more of the block; behind the last one the request begins."""
        before, error = self.taken_in, None
        idle = not self.engine.busy  # then nobody waits for us
        try:
            if not self.checked:
                self.checked = block.check(None if idle else CHECKED)
                if not idle:
                    return
            self.taken_in = import_pages(self.engine, block, at_most=None if idle else SLICE)
        except DataError as refusal:
            error = refusal
        # Where there is no room for more, what is missing will be computed
        if error is None and self.taken_in not in (before, block.positions):
            return
        self.taken_in, self.checked = -1, False
        self.arrived.popleft()
        block.close()
        if error is None:
            self.channel.send(("taken", request.id))
            self.add(request)
        else:
            self.unusable(request, error)

    def unusable(self, request: Request, error: DataError) -> None:
        self.channel.send(("unusable", request.id, error))
        self.add(request)
