"""A sequence: one request on its way, and all that the engine knows of it.

    waiting -> running -> finished           `computed` counts the positions whose state is in the cache
    running -> waiting                       preempted: its pages are given back, or copied out (`swapped`)

`ids` are prompt and output together, and between steps exactly one of them (the newest) is not computed yet, unless a
prompt is still being read in. A preempted sequence simply has more to read in again: nothing else tells it apart.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

from whorl.engine.prefix_hash import PageHash, prefix_hashes
from whorl.engine.request import FinishReason, Request


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One request on its way.

    ids: prompt and output; computed: positions in the cache; pages: of each layer group, in the order of the text
    (`pool.NOWHERE` where a window left them behind); hashes: of the full pages of `ids`, as far as they were needed; slot:
    its row in everything that has one a sequence; swapped: what was copied out of its pages when it was preempted.
    """

    request: Request
    arrival_index: int
    ids: list[int]
    seed: int
    hash_seed: PageHash = b""
    status: SequenceStatus = SequenceStatus.WAITING
    n_computed: int = 0
    pages: list[list[int]] = field(default_factory=list)
    page_hashes: list[PageHash] = field(default_factory=list)
    n_committed_pages: int = 0  # full pages that the pool knows of
    slot: int = -1
    cached_tokens: int = 0  # positions found in the cache when it was first admitted
    n_preemptions: int = 0  # times
    swapped: Any = None
    drafts: list[int] = field(
        default_factory=list
    )  # guesses at what follows `ids`, to be verified in this step
    prompt_log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_checker: Any = None  # `stops.Stops`
    constraint: Any = None  # of its grammar, or of the bytes that its output begins with
    token_counts: Any = None  # `penalties.Seen`, where its settings have penalties
    arrival_time: float = 0.0  # seconds, by the engine's clock
    first_token_time: float = 0.0  # when its first token came

    @property
    def n_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def n_output(self) -> int:
        return len(self.ids) - self.n_prompt

    @property
    def n_uncomputed(self) -> int:
        """Positions that are not in the cache yet: 1 while decoding, more while a prompt is read in."""
        return len(self.ids) - self.n_computed

    @property
    def decoding(self) -> bool:
        return self.n_uncomputed == 1 and self.n_computed > 0

    def compute_page_hashes(self, page_size: int) -> list[PageHash]:
        """Hashes of all full pages of `ids`."""
        return prefix_hashes(self.hash_seed, self.ids, page_size, self.page_hashes)
