"""Programs of many agents, run together.

    ticket = batch.add(program)
    ...                             the other agents of the round add more programs
    batch.result(ticket)            runs all that wait, in parallel, in a new sandbox

Every batch has a new sandbox: a program that reads freed memory of its process finds no program of an earlier batch.
"""

from __future__ import annotations

from whorl.sandbox import Program, ProgramResult, ResourceLimits, Sandbox


class ProgramBatch:
    """See the top of this file. limits: of one program. workers: programs at once."""

    def __init__(self, limits: ResourceLimits, workers: int) -> None:
        self.limits, self.workers = limits, workers
        self._waiting: dict[int, Program] = {}
        self._results: dict[int, ProgramResult] = {}
        self._n = 0

    def add(self, program: Program) -> int:
        """Return the ticket of a program."""
        self._n += 1
        self._waiting[self._n] = program
        return self._n

    def result(self, ticket: int) -> ProgramResult:
        """Return a program's result, once. Raises KeyError for another call."""
        if ticket in self._waiting:
            tickets, programs = list(self._waiting), list(self._waiting.values())
            self._waiting = {}
            with Sandbox(self.limits, workers=min(self.workers, len(programs))) as sandbox:
                self._results.update(zip(tickets, sandbox.run_all(programs), strict=True))
        return self._results.pop(ticket)
