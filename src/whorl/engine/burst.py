"""Several decode steps in one native call, where no step needs the scheduler.

In a step of a small model, Python's part (schedule, batch, sampler) takes as long as the model. A burst draws up to
`EngineConfig.decode_burst` tokens of each row in one call of the native library. A row leaves when it ends. While a sequence
waits for a slot, the burst ends when a quarter of the rows has ended. The scheduler and the accounting of pages then see
a step with several tokens. Random numbers are those of single steps, and so are the tokens.

A burst needs rows that all decode, with equal stop ids, and without penalties, biases, stop strings, grammar, adapter and
alternatives. There are no drafts, and no weights that change between steps.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from whorl.engine.cache.cache_manager import KVCacheManager
from whorl.engine.cache.pages import InputBatch
from whorl.engine.cpu.runner import NativeRunner
from whorl.engine.cpu.sampling import Draws
from whorl.engine.request import Token
from whorl.engine.sampling.sampler import SamplerRow, is_plain, uniforms
from whorl.engine.scheduler import Schedule, Scheduler
from whorl.engine.sequence import Sequence

ENDED_FRACTION = 4  # while a sequence waits, a burst stops when one of this many rows has ended


class DecodeBurst:
    """Runs bursts.

    Args:
        most: tokens of a row, at most. banned: [V] ids that are never sampled. max_positions: of a sequence.
    """

    def __init__(
        self,
        runner: NativeRunner,
        cache: KVCacheManager,
        most: int,
        banned: NDArray[np.bool_],
        max_positions: int,
    ) -> None:
        self.runner, self.cache, self.most = runner, cache, most
        self.banned, self.max_positions = banned, max_positions
        self._stops: tuple[frozenset[int], NDArray[np.bool_]] = frozenset(), np.zeros(len(banned), np.bool_)

    def run(
        self, schedule: Schedule, batch: InputBatch, rows: SequenceABC[SamplerRow], scheduler: Scheduler
    ) -> list[Token | None] | None:
        """Return the tokens of all rows, one row after the other, or None if this step cannot be a burst.

        The schedule then has the number of tokens of each row, and all but the last are drafts of its sequence, which
        `accept_tokens` finds to be correct. None in place of a token: nothing can be drawn.

        scheduler: whose waiting sequences shorten the burst; it counts the tokens.
        """
        sequences = [sequence for sequence, _ in schedule.rows]
        if not self._is_possible(sequences, batch, rows):
            return None
        limits = np.array([min(self.most, self._limit(sequence)) for sequence in sequences])
        if limits.max() < 2 or not self._allocate(sequences, limits):
            return None
        most = int(limits.max())
        seeds = [row.seed for row in rows for _ in range(most)]
        counters = [row.n_drawn + k for row in rows for k in range(most)]
        draws = Draws(
            uniforms(seeds, counters).reshape(-1, most), [row.sampling for row in rows], limits, self.banned,
            self._stop_table(sequences[0].request.stop_ids), max(1, len(rows) // ENDED_FRACTION) if scheduler.waiting else 0,
        )  # fmt: skip
        slots = np.array(batch.slots)
        n_pages = -(-int((np.array(batch.lengths) + limits - 1).max()) // self.cache.page_size)
        tables = [table[slots, :n_pages] for table in self.cache.page_tables]
        self.runner.decode(replace(batch, pages=tables), draws)
        tokens = self._tokens(schedule, draws)
        scheduler.count_burst(schedule)
        return tokens

    def _is_possible(
        self, sequences: SequenceABC[Sequence], batch: InputBatch, rows: SequenceABC[SamplerRow]
    ) -> bool:
        if (
            len(rows) != len(sequences)
            or batch.n_single != len(sequences)
            or not self.runner.can_decode(batch)
        ):
            return False
        stop_ids = sequences[0].request.stop_ids
        return all(
            s.decoding and s.constraint is None and not s.request.stop and not s.forced_bytes_left
            and not row.top_log_probs and s.request.stop_ids == stop_ids and is_plain(row)
            for s, row in zip(sequences, rows, strict=True)
        )  # fmt: skip

    def _limit(self, sequence: Sequence) -> int:
        return min(sequence.n_remaining, self.max_positions - len(sequence.ids))

    def _allocate(self, sequences: SequenceABC[Sequence], limits: NDArray[np.int64]) -> bool:
        """Allocate the pages of all tokens. Those of a burst that does not happen serve the next steps."""
        stops = [s.n_computed + n for s, n in zip(sequences, limits.tolist(), strict=True)]
        return all(self.cache.allocate_slots(s, stop) for s, stop in zip(sequences, stops, strict=True))

    def _stop_table(self, stop_ids: frozenset[int]) -> NDArray[np.bool_]:
        if self._stops[0] != stop_ids:
            table = np.zeros(len(self.banned), np.bool_)
            table[[i for i in stop_ids if 0 <= i < len(table)]] = True
            self._stops = stop_ids, table
        return self._stops[1]

    @staticmethod
    def _tokens(schedule: Schedule, draws: Draws) -> list[Token | None]:
        out: list[Token | None] = []
        drawn = (array.tolist() for array in (draws.counts, draws.ids, draws.log_probs, draws.raw))
        for number, (n, ids, log_probs, raw) in enumerate(zip(*drawn, strict=True)):
            sequence = schedule.rows[number][0]
            schedule.rows[number] = sequence, n
            sequence.drafts = ids[: n - 1]
            out += [
                Token(i, p, r) if i >= 0 else None
                for i, p, r in zip(ids[:n], log_probs[:n], raw[:n], strict=True)
            ]
        return out
