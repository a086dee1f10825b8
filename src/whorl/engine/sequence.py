"""A sequence: one request and its state in the engine.

    waiting -> running -> finished           `n_computed` counts the positions whose state is in the cache
    running -> waiting                       preempted: its pages are freed, or copied out (`swapped`)

`ids` holds prompt and output. Between steps exactly one id (the newest) is not computed, unless prefill is still running.
A preempted sequence has more positions to compute again; nothing else distinguishes it.
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
    """State of one unfinished request.

    ids: prompt and output.
    n_computed: positions in the cache.
    pages: of each layer group, in text order (`EVICTED` where a window freed them).
    page_hashes: of the full pages of `ids`, as far as needed.
    slot: row in per-sequence tensors.
    swapped: the copy of its pages while it is preempted.
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
    n_committed_pages: int = 0  # full pages registered in the pool
    slot: int = -1
    cached_tokens: int = 0  # positions found in the prefix cache at first admission
    n_forced: int = 0  # output ids within the forced prefix
    forced_bytes_left: int = field(init=False)  # of the forced prefix
    n_preemptions: int = 0
    swapped: Any = None
    drafts: list[int] = field(default_factory=list)  # draft tokens to verify in this step
    prompt_log_probs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_checker: Any = None  # `StopStringChecker`
    constraint: Any = None  # `LogitConstraint` of its grammar or its forced prefix
    token_counts: Any = None  # `TokenCounts`, if its settings have penalties
    arrival_time: float = 0.0  # seconds, by the engine's clock
    first_token_time: float = 0.0  # seconds, by the engine's clock

    def __post_init__(self) -> None:
        self.forced_bytes_left = len(self.request.forced_prefix)

    @property
    def n_prompt(self) -> int:
        return len(self.request.ids)

    @property
    def n_output(self) -> int:
        return len(self.ids) - self.n_prompt

    @property
    def n_remaining(self) -> int:
        """Output ids that `max_tokens` still allows."""
        return self.request.max_tokens - (self.n_output - self.n_forced)

    @property
    def n_uncomputed(self) -> int:
        """Positions not yet in the cache: 1 while decoding, more during prefill."""
        return len(self.ids) - self.n_computed

    @property
    def decoding(self) -> bool:
        return self.n_uncomputed == 1 and self.n_computed > 0

    def skip_forced(self, token_bytes: bytes) -> bytes:
        """Return the part of a new token behind the forced prefix; a token without such a part is not counted."""
        if not self.forced_bytes_left:
            return token_bytes
        self.n_forced += len(token_bytes) <= self.forced_bytes_left
        shown = token_bytes[self.forced_bytes_left :]
        self.forced_bytes_left = max(0, self.forced_bytes_left - len(token_bytes))
        return shown

    def compute_page_hashes(self, page_size: int) -> list[PageHash]:
        """Return the hashes of all full pages of `ids`."""
        return prefix_hashes(self.hash_seed, self.ids, page_size, self.page_hashes)
