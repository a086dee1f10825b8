"""Disaggregated prefill and decode: separate processes, with KV blocks transferred between them.

    add(request) -> prefill process: computes the prompt, exports its blocks     (engine/disaggregation/kv_transfer.py)
                 -> decode process: imports them, decodes from a full prefix hit
    step() -> deltas

In one engine, each prefill chunk delays the next token of every running sequence. With separate processes, TPOT depends
only on the decode batch and TTFT only on the prefill queue, so each side is sized for its SLO (Zhong et al. 2024,
DistServe, arXiv 2401.09670). The cost: the cores are split statically, and the KV blocks of each prompt are copied twice.
Measurements on two cores: `bench/engine/disaggregation.py`.

The coordinator implements the interface of an engine (`add`, `step`, `abort`, `busy`) and holds no model. The router's
policy selects a process from the token ids. A prompt with fewer than `min_prefill_tokens` uncached positions goes directly
to a decoder.

- A KV block is passed as a file descriptor (`channel.py`). Its memory is freed when the last descriptor closes.
- If a prefill process dies, its prompts are computed elsewhere. If a decoder dies, its started sequences end with "abort"
  (see `errors`), and the others are queued again. Processes are restarted at most `MAX_RESTARTS` times in total.
- Exported blocks that are not yet imported belong to no cache, so at most `pending_per_decoder` prompts per decoder are
  in transit.
"""

from __future__ import annotations

import logging
import os
import random
import select
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Literal

from whorl.engine.disaggregation.worker_process import WorkerProcess
from whorl.engine.disaggregation.workers import EngineFactory, Role
from whorl.engine.request import Delta, Request
from whorl.errors import DataError, ProducerError
from whorl.router.prefix_index import BLOCK_IDS, block_hashes
from whorl.router.replica_processes import split_cores
from whorl.router.routing_policy import RoutingPolicy, Ticket

LOG = logging.getLogger("whorl.serve")
MAX_RESTARTS = 3


@dataclass(eq=False)
class _InFlight:
    """A request in progress."""

    request: Request
    stage: Literal["queued", "prefill", "importing", "decode"] = "queued"
    process: WorkerProcess | None = None
    ticket: Ticket | None = None
    cached: int | None = None  # prefix hit in the prefill process; the decoder's hit includes the transfer
    started: bool = False


class DisaggregatedEngine:
    """`n_prefill` + `n_decode` processes of one model, behind the interface of an engine.

    Args:
        make_engine: (role) -> engine, called in the process; must be picklable and importable.
        min_prefill_tokens: uncached positions from which a prompt goes to a prefill process.
        pending_per_decoder: prompts in transit per decoder.

    Raises:
        ProducerError: from `add` and `step`, if no decoder is left and none can be restarted.
        WhorlError: from `step` and `wait_until_ready`, if a process cannot load or serve the model.

    `vocab_size` and `max_positions` (of a sequence) are set once a process is ready.
    """

    def __init__(
        self,
        make_engine: EngineFactory,
        n_prefill: int = 1,
        n_decode: int = 1,
        *,
        min_prefill_tokens: int = 128,
        pending_per_decoder: int = 4,
        seed: int = 0,
    ) -> None:
        self.make_engine, self.min_prefill_tokens, self.max_pending = (
            make_engine,
            min_prefill_tokens,
            pending_per_decoder * n_decode,
        )
        self.errors: dict[str, Exception] = {}  # why a request ended with "abort" without a call of `abort`
        self.n_transferred = self.n_rejected_blocks = 0
        self.vocab_size = self.max_positions = 0
        self._in_flight: dict[str, _InFlight] = {}
        self._queue: deque[_InFlight] = deque()
        self._deltas: list[Delta] = []
        self._restarts_left = MAX_RESTARTS
        self._policies = {role: RoutingPolicy(random.Random(seed)) for role in ("prefill", "decode")}
        names: list[tuple[str, Role]] = [(f"prefill{i}", "prefill") for i in range(n_prefill)]
        names += [(f"decode{i}", "decode") for i in range(n_decode)]
        self._processes: dict[str, WorkerProcess] = {}
        self._roles = dict(names)
        for (name, role), cores in zip(names, split_cores(len(names)), strict=True):
            self._start_process(name, role, cores)

    @property
    def busy(self) -> bool:
        """Whether requests are in progress or deltas are pending."""
        return bool(self._in_flight or self._deltas)

    def add(self, request: Request) -> None:
        """Add a request; its id must be new. A rejected request ends with "abort", and `errors` has the reason."""
        if request.id in self._in_flight:
            raise DataError(f"id {request.id!r} belongs to a request in progress", expected="a new id")
        self._in_flight[request.id] = entry = _InFlight(request)
        self._queue.append(entry)
        self._dispatch_queued()

    def abort(self, request_id: str) -> bool:
        """End a request; the next step reports it. Returns False if no such request is in progress."""
        entry = self._in_flight.get(request_id)
        if entry is None:
            return False
        if entry.process is not None:
            entry.process.post(("abort", request_id))
        self._finish(entry, Delta(request_id, finish_reason="abort"))
        return True

    def step(self, seconds: float = 0.02) -> list[Delta]:
        """Return the deltas that arrived from the processes; wait at most `seconds` for the first."""
        self._dispatch_queued()
        processes = {p.channel: p for p in self._processes.values()}
        waiting = 0.0 if self._deltas else seconds
        for channel in select.select(list(processes), [], [], waiting)[0]:
            process = processes[channel]
            try:
                while channel.poll(0):
                    self._on_message(process, *channel.receive_with_fd())
            except EOFError:
                self._on_exit(process)
        self._dispatch_queued()
        deltas, self._deltas = self._deltas, []
        return deltas

    def wait_until_ready(self) -> None:
        """Wait until every process has loaded its model. Raises ProducerError if one exits."""
        while not all(p.ready for p in self._processes.values()):
            self._deltas += self.step(1.0)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.close()
        self._processes = {}

    def __enter__(self) -> DisaggregatedEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ready(self, role: Role) -> list[str]:
        return [p.name for p in self._processes.values() if self._roles[p.name] == role and p.ready]

    def _dispatch_queued(self) -> None:
        """Dispatch queued requests while the number of prompts in transit is below the limit."""
        while self._queue and self._ready("decode"):
            entry = self._queue[0]
            hashes = block_hashes(entry.request.ids, str(entry.request.adapter).encode())
            decoders = self._policies["decode"]
            cached = max(decoders.indexes[n].match_length(hashes) for n in self._ready("decode")) * BLOCK_IDS
            # The process that computes the prompt returns its log-probabilities. Blocks of adapters are not transferred.
            needs_decoder = entry.request.prompt_log_probs or entry.request.adapter is not None
            short = len(entry.request.ids) - cached < self.min_prefill_tokens
            prefill_workers = self._ready("prefill")
            if short or needs_decoder or not prefill_workers:
                self._queue.popleft()
                self._send_to_decoder(entry, None)
                continue
            if sum(w.stage in ("prefill", "importing") for w in self._in_flight.values()) >= self.max_pending:
                return
            self._queue.popleft()
            self._send(entry, "prefill", "prefill", ("read", entry.request), None)

    def _send_to_decoder(self, entry: _InFlight, fd: int | None) -> None:
        self._send(entry, "decode", "decode" if fd is None else "importing", ("write", entry.request), fd)

    def _send(self, entry: _InFlight, role: Role, stage: Any, message: Any, fd: int | None) -> None:
        policy = self._policies[role]
        hashes = block_hashes(entry.request.ids, str(entry.request.adapter).encode())
        name = policy.choose(hashes, self._ready(role)).replica
        self._end_ticket(entry)
        entry.stage, entry.process, entry.ticket = stage, self._processes[name], policy.begin(hashes, name)
        entry.process.post(message, fd)

    def _on_message(self, process: WorkerProcess, message: Any, fd: int | None) -> None:
        verb, *values = message
        if verb == "ready":
            process.ready = True
            self.vocab_size, self.max_positions = values[1:]
            self._policies[self._roles[process.name]].add(process.name, values[0] // BLOCK_IDS)
            return
        if verb == "failed":
            raise values[0]
        if verb == "deltas":
            for delta in values[0]:
                self._on_delta(process, delta)
            return
        entry = self._in_flight.get(values[0])
        if entry is None or entry.process is not process:
            if fd is not None:
                os.close(fd)  # the request was aborted, or started in another process
        elif verb == "read":
            assert fd is not None
            entry.cached = values[1]
            self.n_transferred += 1
            if self._ready("decode"):
                self._send_to_decoder(entry, fd)
            else:
                os.close(fd)
                self._requeue(entry)
        elif verb == "taken":
            entry.stage = "decode"
        elif verb == "unusable":
            self.n_rejected_blocks += 1
            LOG.warning("KV blocks of request %s were rejected, computing it again: %s", *values)
            entry.stage, entry.cached = "decode", None
        elif verb == "refused":
            self.errors[values[0]] = values[1]
            self._finish(entry, Delta(values[0], finish_reason="abort"))

    def _on_delta(self, process: WorkerProcess, delta: Delta) -> None:
        entry = self._in_flight.get(delta.request_id)
        if entry is None or entry.process is not process:
            return
        if not entry.started and entry.cached is not None:
            delta = replace(delta, cached_tokens=entry.cached)
        entry.started = True
        if entry.ticket is not None:
            self._policies["decode"].mark_prefilled(entry.ticket)
        if delta.finish_reason is None:
            self._deltas.append(delta)
        else:
            self._finish(entry, delta)

    def _finish(self, entry: _InFlight, delta: Delta) -> None:
        del self._in_flight[entry.request.id]
        if entry in self._queue:
            self._queue.remove(entry)
        self._end_ticket(entry)
        self._deltas.append(delta)

    def _end_ticket(self, entry: _InFlight) -> None:
        if entry.ticket is not None:
            self._policies["decode"].end(
                entry.ticket
            )  # any policy works: a ticket holds a reference to its load counters

    def _requeue(self, entry: _InFlight) -> None:
        self._end_ticket(entry)
        entry.stage, entry.process, entry.ticket, entry.cached = "queued", None, None, None
        self._queue.appendleft(entry)

    def _on_exit(self, process: WorkerProcess) -> None:
        exit_description = process.exit_description()
        process.close()
        del self._processes[process.name]
        if process.ready:
            self._policies[self._roles[process.name]].remove(process.name)
        for entry in [w for w in self._in_flight.values() if w.process is process]:
            if entry.started:
                self.errors[entry.request.id] = ProducerError(
                    f"{exit_description} while it generated the output"
                )
                self._finish(entry, Delta(entry.request.id, finish_reason="abort"))
            else:
                self._requeue(entry)
        if not process.ready:
            raise ProducerError(f"{exit_description} before it loaded its model", do="see its earlier output")
        if self._restarts_left > 0:
            self._restarts_left -= 1
            self._start_process(process.name, self._roles[process.name], process.cores)
        if not any(self._roles[name] == "decode" for name in self._processes):
            raise ProducerError(
                f"{exit_description}, and no decoder is left", do="see its earlier output; restart the server"
            )

    def _start_process(self, name: str, role: Role, cores: tuple[int, ...]) -> None:
        self._processes[name] = process = WorkerProcess(
            name, "whorl.engine.disaggregation.workers:run_worker", cores
        )
        process.post((role, self.make_engine, max(1, len(cores))))
