"""The scheduler: which sequences get how many positions in the next step of the model.

Continuous batching (Yu et al. 2022, Orca): the batch is made anew at every step, so that whoever is done leaves and whoever
waits enters. Chunked prefill (Agrawal et al. 2024, Sarathi-Serve, arXiv:2403.02310): a step computes at most `token_budget`
positions; those that decode come first, one each (and their drafts), and what is left of the budget reads prompts in,
in pieces, so that no long prompt holds up the others. How large the pieces may be while others decode, `Pace` says.

Who comes first: the lower `priority`; then the client that was served least (the virtual token counter of Sheng et al. 2024,
Fairness in Serving Large Language Models, arXiv:2401.00588: a client's counter goes up by what it is served, and one that
comes back from idleness starts at the lowest of the active ones); then whoever came first.

When pages run out, the sequence that would have come last is preempted: its pages are given back and it waits again, to be
read in once more, which costs products and no memory ("recompute"), or its pages are copied out and back ("swap"). The
subtle part is that this must end: the sequence for which room is made comes before the one that goes, so the first of all
always gets on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from whorl.engine.cache.cache_manager import Cache
from whorl.engine.scheduling.prefill_budget import Pace
from whorl.engine.sequence import Sequence, Status

OUTPUT_WEIGHT = 2.0  # a token written costs so many tokens read (the paper's weights)


@dataclass
class Schedule:
    """What the next step computes: positions `computed` .. `computed + n` of each sequence; decoding rows come first.

    A decoding row of n > 1 has n - 1 guesses behind its newest token.
    """

    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    decode_tokens: int = 0  # positions of rows that decode, drafts included
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.rows)


class Scheduler:
    """Decides; it never touches a tensor.

    Args:
        cache: the books of the pages.
        max_sequences: that run at once.
        token_budget: positions a step at most.
        pace: bounds what is read in beside decoding sequences.
        by_page: read prompts in page by page, wherever the budget ends, so that the pieces are always the same.
        swap: called with a sequence before its pages are given back, to copy them out; None recomputes.
        restore: called with a sequence that has pages and a slot again, to copy them back.
    """

    def __init__(
        self,
        cache: Cache,
        max_sequences: int,
        token_budget: int,
        pace: Pace,
        by_page: bool = False,
        swap: Callable[[Sequence], None] | None = None,
        restore: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.cache, self.max_sequences, self.token_budget, self.pace = (
            cache,
            max_sequences,
            token_budget,
            pace,
        )
        self.by_page, self.swap, self.restore = by_page, swap, restore
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.served: dict[str, float] = defaultdict(float)  # of each active client
        self.preemptions = 0
        self._slots = list(range(max_sequences - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """One more that waits."""
        client = sequence.request.client
        active = {s.request.client for s in (*self.waiting, *self.running)}
        if client not in active:
            self.served = defaultdict(float, {c: self.served[c] for c in active})
            self.served[client] = min(self.served.values(), default=0.0)
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """One less, whatever it was doing; its pages and its slot are given back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.swapped = None
        sequence.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """The next step; empty when nothing waits or runs."""
        out = Schedule()
        budget = self.token_budget
        queue = sorted(self.running, key=self._rank)
        self.running = list(queue)
        decoding = [s for s in queue if s.decoding]
        for sequence in decoding:
            if sequence.status is not Status.RUNNING or budget < 1:
                continue
            n = min(1 + len(sequence.drafts), budget)
            if not self._make_room(sequence, sequence.computed + n, out):
                continue
            del sequence.drafts[n - 1 :]
            out.rows.append((sequence, n))
            budget -= n
        # Making room for a later one may have preempted an earlier entry of this step.
        out.rows = [(s, n) for s, n in out.rows if s.status is Status.RUNNING]
        out.decode_tokens = out.tokens
        budget = min(budget, self.pace.prefill_budget(len(out.rows), self.token_budget))
        for sequence in queue:
            if not sequence.decoding and sequence.status is Status.RUNNING:
                budget -= self._read(sequence, budget, out)
        self._admit(budget, out)
        for sequence, n in out.rows:
            self.served[sequence.request.client] += n * (OUTPUT_WEIGHT if sequence.n_output else 1.0)
        return out

    def _read(self, sequence: Sequence, budget: int, out: Schedule) -> int:
        """Gives `sequence` positions of what it has to read in: -> how many."""
        n = min(sequence.to_read, budget)
        if self.by_page:
            piece = min(sequence.to_read, self.cache.page_size - sequence.computed % self.cache.page_size)
            n = piece if piece <= max(n, 0) or not out.rows else 0
        if n < 1:
            return 0
        if not self.cache.grow(sequence, sequence.computed + n):
            room = self._room(sequence)
            n = min(n, room)
            if n < 1 or not self.cache.grow(sequence, sequence.computed + n):
                if out.rows:
                    return 0  # others get on, and will give pages back
                n = min(sequence.to_read, budget)
                if not self._make_room(sequence, sequence.computed + n, out):
                    return 0
        out.rows.append((sequence, n))
        return n

    def _room(self, sequence: Sequence) -> int:
        """Positions that `sequence` could enter with the pages that are free now."""
        held = min(len(pages) for pages in sequence.pages)
        free = min(group.pool.available for group in self.cache.groups)
        return (held + free) * self.cache.page_size - sequence.computed

    def _admit(self, budget: int, out: Schedule) -> None:
        """Lets in those that wait, as far as the budget, the slots and the pages go."""
        if not self.waiting or budget < 1:
            return
        for sequence in sorted(self.waiting, key=self._rank):
            if budget < 1 or not self._slots:
                return
            if sequence.swapped is not None:
                if not self._return(sequence):
                    return
                if sequence.decoding:  # it decodes from the next step on
                    continue
            else:
                self.cache.admit(sequence)
                n = min(sequence.to_read, budget)
                stop = sequence.computed + n
                # Besides its own, a page for each that runs: or whoever enters would drive out those who are further.
                spare = len(self.running) if self.running else 0
                lacking = self.cache.missing(sequence, stop)
                pools = [group.pool for group in self.cache.groups]
                if any(k + spare > p.available for k, p in zip(lacking, pools, strict=True)):
                    self.cache.release(sequence)
                    sequence.computed = 0
                    if not self.running and not out.rows:
                        raise RuntimeError(
                            f"request {sequence.request.id!r} does not fit into an empty cache"
                        )
                    return
                self._enter(sequence)
                if not sequence.preempted:
                    sequence.cached = sequence.computed
                    self.cache.found += sequence.computed
                    self.cache.asked += sequence.n_prompt
            budget -= self._read(sequence, budget, out)

    def _return(self, sequence: Sequence) -> bool:
        """Gives a swapped-out sequence pages and a slot again, and its contents back."""
        assert self.restore is not None
        sequence.pages = [[] for _ in self.cache.groups]
        need = -(-(sequence.computed + 1) // self.cache.page_size)
        if any(need + len(self.running) > g.pool.available for g in self.cache.groups):
            return False
        self._enter(sequence)
        self.cache.grow(sequence, sequence.computed + 1)
        self.restore(sequence)
        # What had been left behind a window came back empty, and must not be taken for what it was.
        self.cache.leave_behind(sequence)
        return True

    def _enter(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        sequence.status = Status.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.cache.enter(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.cache.release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _make_room(self, sequence: Sequence, stop: int, out: Schedule) -> bool:
        """Pages for `sequence` up to `stop`, others being preempted if need be; False if it went itself."""
        while not self.cache.grow(sequence, stop):
            last = max(self.running, key=self._rank)
            self.preempt(last, out)
            if last is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence, out: Schedule | None = None) -> None:
        """Takes pages and slot from one that runs; it waits again."""
        self.running.remove(sequence)
        if self.swap is not None and sequence.computed:
            self.swap(sequence)
        self._leave(sequence)
        if sequence.swapped is None:
            sequence.computed = 0
        sequence.drafts.clear()
        sequence.status = Status.WAITING
        sequence.preempted += 1
        self.preemptions += 1
        self.waiting.append(sequence)
        if out is not None:
            out.preempted.append(sequence)

    def _rank(self, sequence: Sequence) -> tuple[int, float, int]:
        r = sequence.request
        # Those who run keep their place among themselves: fairness decides who enters, not who is thrown out.
        fair = 0.0 if sequence.status is Status.RUNNING or sequence.preempted else self.served[r.client]
        return r.priority, fair, sequence.arrival

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raises RuntimeError when a sequence is in no queue or in two, or a slot is held twice or by nobody."""
        waiting, running = set(map(id, self.waiting)), set(map(id, self.running))
        alive = [s for s in sequences if s.status is not Status.FINISHED]
        if waiting & running or len(waiting) != len(self.waiting) or len(running) != len(self.running):
            raise RuntimeError("a sequence is in two queues")
        if {id(s) for s in alive} != waiting | running:
            raise RuntimeError("a sequence that is not finished is in no queue, or one in a queue is unknown")
        slots = sorted([s.slot for s in self.running] + self._slots)
        if slots != list(range(self.max_sequences)):
            raise RuntimeError(f"slots are lost or held twice: {slots}")
        self.cache.check_integrity(alive)
