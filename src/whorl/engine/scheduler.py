"""The scheduler assigns the positions of the next step to sequences.

Continuous batching (Yu et al. 2022, Orca): the batch is formed again at every step, so finished sequences leave and waiting
ones enter. Chunked prefill (Agrawal et al. 2024, Sarathi-Serve, arXiv:2403.02310): a step computes at most
`max_num_batched_tokens` positions. Decoding sequences come first, one position each plus their drafts. The rest of the
budget goes to prefill in chunks, so that a long prompt does not stall the others. `PrefillBudget` bounds the chunk size.

The order is: lower `priority` first; then the client that was served least; then arrival order. Service is counted by the
virtual token counter of Sheng et al. 2024 (Fairness in Serving Large Language Models, arXiv:2401.00588). A client's counter
grows with its tokens, and a client that returns from idleness starts at the lowest counter of the active ones.

When pages run out, the last sequence in this order is preempted. Its pages are freed and it is computed again later
("recompute"), or its pages are copied out and back ("swap"). The subtle point is progress: a sequence only preempts ones
that come after it, so the first sequence always advances.

A prefix that several waiting sequences share is computed once: a sequence does not start in a step that computes a page of
its prompt, and finds that page in the cache one step later.

`PrefillBudget` is the number of prompt positions that may run in a step with decoding sequences. A step that computes n
prompt positions together with decoding rows takes about

    seconds = decode(rows) + n * per_token

and every decoding sequence waits for all of it (its time per output token). So n is chosen to keep the step within
`max_decode_slowdown` times a decode-only step, or within `slo_tpot`, whichever is longer. Both terms are measured from the
steps themselves, since they depend on model, machine and load; decode(rows) for each number of rows up to a power of 2.
Without decoding rows the whole budget is used. With an infinite `max_decode_slowdown` it always is: then no step depends on
measured times, and the same requests make the same steps in any engine.

The subtle point is that both terms drift and are noisy: background load slows single steps many times, and longer sequences
cost more. So each is the median of the newest `MEDIAN_WINDOW` measurements. During a long prefill, every
`MAX_CONSECUTIVE_MIXED_STEPS` steps one step only decodes, to be measured. At least one position is always allowed, so that
every prompt finishes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

from whorl.engine.cache.cache_manager import KVCacheManager
from whorl.engine.prefix_hash import PageHash
from whorl.engine.sequence import Sequence, SequenceStatus

INITIAL_PREFILL_TOKENS = 8  # positions, before the first measurement
MAX_CONSECUTIVE_MIXED_STEPS = 16  # mixed steps before a decode-only step
MEDIAN_WINDOW = 7  # measurements


class PrefillBudget:
    """Measures steps with `record_step` and answers `max_prefill_tokens`.

    Args:
        max_decode_slowdown: limit of a step's time, relative to a decode-only step.
        slo_tpot: target seconds per output token, or None.
    """

    def __init__(self, max_decode_slowdown: float = 1.8, slo_tpot: float | None = None) -> None:
        self.max_decode_slowdown, self.slo_tpot = max_decode_slowdown, slo_tpot
        self._decode_samples: dict[
            int, deque[float]
        ] = {}  # seconds of decode-only steps, by rows up to a power of 2
        # Seconds per prefill position.
        self._seconds_per_prefill_token: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._n_mixed_steps = 0  # mixed steps since the last decode-only step

    def record_step(self, n_decode: int, n_prefill: int, seconds: float) -> None:
        """Record a finished step with so many decoding rows and prompt positions."""
        if n_prefill:
            self._n_mixed_steps += n_decode > 0
            self._seconds_per_prefill_token.append(
                max(0.1 * seconds, seconds - (self._decode_seconds(n_decode) or 0.0)) / n_prefill
            )
        elif n_decode:
            self._n_mixed_steps = 0
            self._decode_samples.setdefault((n_decode - 1).bit_length(), deque(maxlen=MEDIAN_WINDOW)).append(
                seconds
            )

    def max_prefill_tokens(self, n_decode: int, limit: int) -> int:
        """Return how many prompt positions, at most `limit`, may run in a step with `n_decode` decoding rows."""
        if not n_decode or self.max_decode_slowdown == math.inf:
            return limit
        if self._n_mixed_steps >= MAX_CONSECUTIVE_MIXED_STEPS:
            return 0
        decode_seconds = self._decode_seconds(n_decode)
        if decode_seconds is None or not self._seconds_per_prefill_token:
            return min(limit, INITIAL_PREFILL_TOKENS)
        spare_seconds = max(
            decode_seconds * (self.max_decode_slowdown - 1), (self.slo_tpot or 0.0) - decode_seconds
        )
        return min(limit, max(1, int(spare_seconds / median(self._seconds_per_prefill_token))))

    def _decode_seconds(self, n_decode: int) -> float | None:
        """Seconds of a decode-only step with so many rows, by the nearest measured size."""
        if not n_decode or not self._decode_samples:
            return None
        size = (n_decode - 1).bit_length()
        return median(self._decode_samples[min(self._decode_samples, key=lambda n_rows: abs(n_rows - size))])


OUTPUT_WEIGHT = 2.0  # an output token costs as much as this many prompt tokens (the paper's weights)


@dataclass
class Schedule:
    """The next step: positions n_computed .. n_computed + n of each sequence; decoding rows come first.

    A decoding row with n > 1 has n - 1 drafts after its newest token.
    """

    rows: list[tuple[Sequence, int]] = field(default_factory=list)
    decode_tokens: int = 0  # positions of decoding rows, drafts included
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(n for _, n in self.rows)


class Scheduler:
    """Forms steps; it never touches a tensor.

    Args:
        cache: page accounting.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: maximum positions per step.
        prefill_budget: bounds prefill in steps with decoding sequences.
        page_aligned_prefill: prefill in whole pages, so that chunks do not depend on the budget.
        swap_out: called with a sequence before its pages are freed, to copy them out; None recomputes.
        swap_in: called with a sequence that has pages and a slot again, to copy them back.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefill_budget: PrefillBudget,
        page_aligned_prefill: bool = False,
        swap_out: Callable[[Sequence], None] | None = None,
        swap_in: Callable[[Sequence], None] | None = None,
    ) -> None:
        self.cache, self.max_num_seqs, self.max_num_batched_tokens, self.prefill_budget = (
            cache,
            max_num_seqs,
            max_num_batched_tokens,
            prefill_budget,
        )
        self.page_aligned_prefill, self.swap_out, self.swap_in = page_aligned_prefill, swap_out, swap_in
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.virtual_counters: dict[str, float] = defaultdict(float)  # of each active client
        self.n_preemptions = 0
        self._n_of_client: Counter[str] = Counter()  # unfinished sequences
        self._computed_pages: set[PageHash] = set()  # that this step fills
        self._slots = list(range(max_num_seqs - 1, -1, -1))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        client = sequence.request.client
        if not self._n_of_client[client]:
            active = [c for c, n in self._n_of_client.items() if n]
            self._n_of_client = Counter({c: self._n_of_client[c] for c in active})
            self.virtual_counters = defaultdict(float, {c: self.virtual_counters[c] for c in active})
            self.virtual_counters[client] = min(self.virtual_counters.values(), default=0.0)
        self._n_of_client[client] += 1
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence in any state; frees its pages and its slot."""
        if sequence.status is not SequenceStatus.FINISHED:
            self._n_of_client[sequence.request.client] -= 1
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            self._free(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.swapped = None
        sequence.status = SequenceStatus.FINISHED

    def schedule(self) -> Schedule:
        """Return the next step; empty if nothing waits or runs."""
        out = Schedule()
        self._computed_pages.clear()
        budget = self.max_num_batched_tokens
        queue = sorted(self.running, key=self._sort_key)
        self.running = list(queue)
        decoding = [s for s in queue if s.decoding]
        for sequence in decoding:
            if sequence.status is not SequenceStatus.RUNNING or budget < 1:
                continue
            n = sequence.n_uncomputed + len(sequence.drafts)
            if n > budget and sequence.block > 1:  # a block is computed in one piece
                continue
            n = min(n, budget)
            if not self._allocate_or_preempt(sequence, sequence.n_computed + n, out):
                continue
            del sequence.drafts[n - sequence.n_uncomputed :]
            out.rows.append((sequence, n))
            budget -= n
        # Allocating for a later sequence may have preempted an earlier entry of this step.
        out.rows = [(s, n) for s, n in out.rows if s.status is SequenceStatus.RUNNING]
        out.decode_tokens = out.tokens
        budget = min(
            budget, self.prefill_budget.max_prefill_tokens(len(out.rows), self.max_num_batched_tokens)
        )
        for sequence in queue:
            if not sequence.decoding and sequence.status is SequenceStatus.RUNNING:
                budget -= self._schedule_prefill(sequence, budget, out)
        self._schedule_waiting(budget, out)
        for sequence, n in out.rows:
            self.virtual_counters[sequence.request.client] += n * (
                OUTPUT_WEIGHT if sequence.n_output else 1.0
            )
        return out

    def count_burst(self, schedule: Schedule) -> None:
        """Count the tokens of a step that drew several of each row, of which `schedule` counted one."""
        schedule.decode_tokens = schedule.tokens
        for sequence, n in schedule.rows:
            self.virtual_counters[sequence.request.client] += (n - 1) * OUTPUT_WEIGHT

    def _schedule_prefill(self, sequence: Sequence, budget: int, out: Schedule) -> int:
        """Assign prefill positions to `sequence`; returns how many."""
        n = min(sequence.n_uncomputed, budget)
        if self.page_aligned_prefill:
            chunk = min(
                sequence.n_uncomputed, self.cache.page_size - sequence.n_computed % self.cache.page_size
            )
            n = chunk if chunk <= max(n, 0) or not out.rows else 0
        if sequence.block > 1 and n > 0:  # whole blocks, and at least one
            n = min(sequence.n_uncomputed, max(n, sequence.block)) // sequence.block * sequence.block
        if n < 1:
            return 0
        if not self.cache.allocate_slots(sequence, sequence.n_computed + n):
            allocatable = self._allocatable_positions(sequence)
            n = min(n, allocatable)
            if n < 1 or not self.cache.allocate_slots(sequence, sequence.n_computed + n):
                if out.rows:
                    return 0  # other sequences advance and will free pages
                n = min(sequence.n_uncomputed, budget)
                if not self._allocate_or_preempt(sequence, sequence.n_computed + n, out):
                    return 0
        out.rows.append((sequence, n))
        self._computed_pages.update(self.cache.pages_to_commit(sequence, sequence.n_computed + n))
        return n

    def _allocatable_positions(self, sequence: Sequence) -> int:
        """Positions that the free pages allow for `sequence`."""
        n_pages = min(len(pages) for pages in sequence.pages)
        free = min(group.pool.n_available for group in self.cache.groups)
        return (n_pages + free) * self.cache.page_size - sequence.n_computed

    def _schedule_waiting(self, budget: int, out: Schedule) -> None:
        """Start waiting sequences, as far as the budget, the slots and the pages allow."""
        if not self.waiting or budget < 1:
            return
        n_reserved = 0  # slots
        for sequence in sorted(self.waiting, key=self._sort_key):
            if budget < 1 or len(self._slots) <= n_reserved:
                return
            if sequence.swapped is None and self.cache.shares_pages(sequence, self._computed_pages):
                # A text to score leaves its slot after its prefill; a completion must not lose its turn.
                n_reserved += sequence.samples
                continue
            if sequence.swapped is not None:
                if not self._resume_swapped(sequence):
                    return
                if sequence.decoding:  # it decodes from the next step on
                    continue
            else:
                self.cache.acquire_prefix(sequence)
                n = min(sequence.n_uncomputed, budget)
                stop = sequence.n_computed + n
                # Keep one spare page per running sequence, so that the new one does not preempt them at once.
                n_spare = len(self.running) if self.running else 0
                lacking = self.cache.pages_needed(sequence, stop)
                pools = [group.pool for group in self.cache.groups]
                if any(k + n_spare > p.n_available for k, p in zip(lacking, pools, strict=True)):
                    self.cache.release(sequence)
                    sequence.n_computed = 0
                    if not self.running and not out.rows:
                        raise RuntimeError(
                            f"request {sequence.request.id!r} does not fit into an empty cache"
                        )
                    return
                self._start_running(sequence)
                if not sequence.n_preemptions:
                    sequence.cached_tokens = sequence.n_computed
                    self.cache.hit_tokens += sequence.n_computed
                    self.cache.queried_tokens += sequence.n_prompt
            if sequence.block == 1 or not sequence.decoding:  # a prompt within its first block has a canvas
                budget -= self._schedule_prefill(sequence, budget, out)

    def _resume_swapped(self, sequence: Sequence) -> bool:
        """Give a swapped-out sequence pages and a slot, and copy its contents back."""
        assert self.swap_in is not None
        sequence.pages = [[] for _ in self.cache.groups]
        need = -(-(sequence.n_computed + 1) // self.cache.page_size)
        if any(need + len(self.running) > g.pool.n_available for g in self.cache.groups):
            return False
        self._start_running(sequence)
        self.cache.allocate_slots(sequence, sequence.n_computed + 1)
        self.swap_in(sequence)
        # Pages before the window come back empty and must not be used.
        self.cache.free_out_of_window(sequence)
        return True

    def _start_running(self, sequence: Sequence) -> None:
        sequence.slot = self._slots.pop()
        sequence.status = SequenceStatus.RUNNING
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.cache.bind(sequence)

    def _free(self, sequence: Sequence) -> None:
        self.cache.release(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _allocate_or_preempt(self, sequence: Sequence, stop: int, out: Schedule) -> bool:
        """Allocate pages for `sequence` up to `stop`, preempting others if needed; False if it was preempted itself."""
        while not self.cache.allocate_slots(sequence, stop):
            last = max(self.running, key=self._sort_key)
            self.preempt(last, out)
            if last is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence, out: Schedule | None = None) -> None:
        """Free the pages and the slot of a running sequence; it waits again."""
        self.running.remove(sequence)
        if self.swap_out is not None and sequence.n_computed:
            self.swap_out(sequence)
        self._free(sequence)
        if sequence.swapped is None:
            sequence.n_computed = 0
        sequence.drafts.clear()
        sequence.status = SequenceStatus.WAITING
        sequence.n_preemptions += 1
        self.n_preemptions += 1
        self.waiting.append(sequence)
        if out is not None:
            out.preempted.append(sequence)

    def _sort_key(self, sequence: Sequence) -> tuple[int, float, int]:
        r = sequence.request
        # Fairness decides which sequence starts, not which one is preempted.
        fair = (
            0.0
            if sequence.status is SequenceStatus.RUNNING or sequence.n_preemptions
            else self.virtual_counters[r.client]
        )
        return r.priority, fair, sequence.arrival_index

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """Raise RuntimeError if a sequence is in no queue or in two, or a slot is held twice or lost."""
        waiting, running = set(map(id, self.waiting)), set(map(id, self.running))
        alive = [s for s in sequences if s.status is not SequenceStatus.FINISHED]
        if waiting & running or len(waiting) != len(self.waiting) or len(running) != len(self.running):
            raise RuntimeError("a sequence is in two queues")
        if {id(s) for s in alive} != waiting | running:
            raise RuntimeError("an unfinished sequence is in no queue, or a queue has an unknown sequence")
        slots = sorted([s.slot for s in self.running] + self._slots)
        if slots != list(range(self.max_num_seqs)):
            raise RuntimeError(f"slots are lost or held twice: {slots}")
        self.cache.check_integrity(alive)
