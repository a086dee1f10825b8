"""A sequence: one request and its state in the engine.

    waiting -> running -> finished           `n_computed` counts the positions whose state is in the cache
    running -> waiting                       preempted: its pages are freed, or copied out (`swapped`)

`ids` holds prompt and output. Between steps exactly one id (the newest) is not computed, unless prefill is still running.
A preempted sequence has more positions to compute again; nothing else distinguishes it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from whorl.engine.prefix_hash import PageHash, prefix_hashes
from whorl.engine.request import Alternatives, FinishReason, Request, Token


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class PromptScores:
    """Scores of the ids at the positions first + 1 and later, as far as they are computed."""

    first: int
    log_probs: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)

    def put(
        self, position: int, log_probs: list[float], greedy: list[bool], alternatives: list[Alternatives]
    ) -> None:
        """Store the scores of the ids after `position`; after a preemption they replace earlier ones."""
        at = position - self.first
        self.log_probs[at:], self.greedy[at:], self.alternatives[at:] = log_probs, greedy, alternatives


@dataclass(eq=False)
class Sequence:
    """State of one unfinished request.

    ids: prompt and output; of a scored text without its last id, whose position is not needed.
    n_prompt: how many of them are the prompt.
    n_computed: positions in the cache.
    pages: of each layer group, in text order (`EVICTED` where a window freed them).
    page_hashes: of the full pages of `ids`, as far as needed.
    slot: row in per-sequence tensors.
    swapped: the copy of its pages while it is preempted.
    block: positions that a masked diffusion model computes together (`canvas.py`); 1 for models of the next token.
    revealed: of a canvas: the tokens of its masks, None where one is left.
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
    block: int = 1
    revealed: list[Token | None] = field(default_factory=list)
    reveal_per_step: int = 1  # tokens
    scores: PromptScores | None = None  # if the prompt is scored
    finish_reason: FinishReason | None = None
    stop_checker: Any = None  # `StopStringChecker`
    constraint: Any = None  # `LogitConstraint` of its grammar or its forced prefix
    token_counts: Any = None  # `TokenCounts`, if its settings have penalties

    n_prompt: int = field(init=False)
    samples: bool = field(init=False)  # whether it continues its prompt; otherwise it ends with the prompt

    def __post_init__(self) -> None:
        self.samples = self.request.score_from is None
        self.forced_bytes_left = len(self.request.forced_prefix)
        self.n_prompt = self.request.n_prefilled
        first = self.request.first_scored_position
        if first is not None:
            self.scores = PromptScores(first)

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
        begun = self.n_computed > 0 or self.block > 1
        return self.n_uncomputed <= self.block and begun and self.samples

    @property
    def masked_positions(self) -> list[int]:
        """Positions of a canvas that are masked."""
        return [len(self.ids) + k for k, token in enumerate(self.revealed) if token is None]

    def positions_to_sample(self, stop: int) -> SequenceABC[int]:
        """Positions, in a row that ends before `stop`, whose logits are sampled: the newest id's and its drafts'."""
        if self.block > 1:
            reached = self.drafts and stop == len(self.ids) + len(self.drafts)
            return self.masked_positions if reached else []
        return range(len(self.ids) - 1, stop) if self.samples else []

    def positions_to_score(self, stop: int) -> range:
        """Positions before `stop`, not computed yet, whose logits score an id of the prompt."""
        if self.scores is None or self.n_output:
            return range(0)
        return range(max(self.n_computed, self.scores.first), min(stop, len(self.request.ids) - 1))

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


class Proposer(Protocol):
    """Proposes draft tokens (`speculation/proposers.py`). needs_hidden_states: `observe` needs the hidden states."""

    needs_hidden_states: bool

    def propose(self, sequences: SequenceABC[Sequence]) -> None:
        """Set `drafts` of each sequence."""
        ...

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """Receive the hidden states [n, d_model] of the positions computed last, without rejected drafts."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Release the state of a finished sequence."""
        ...
