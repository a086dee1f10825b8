"""The engine: requests in, one step of the model at a time, tokens out. What serves people also rolls out and scores.

    engine = Engine(model, EngineConfig(), token_bytes=..., forbidden=...)
    engine.add(Request(id="a", ids=(1, 2, 3)))
    while engine.busy:
        for delta in engine.step(): ...

A step is: the scheduler says which rows, the rows become a `Batch`, the runner makes logits, the sampler draws, and every
sequence that got further is told of. Nothing here waits or runs in a thread; a server puts that around it.

Drafts. A sequence may have guesses at what follows (`speculate.py`). They are computed as further positions of its row, and
then every position's token is drawn as if there were no guesses, with the random number that belongs to its place; the
guesses are kept as long as they are what was drawn. So a guess, however bad, never changes a token, let alone the
distribution: the same seed writes the same text with and without.

New weights come in between two steps (`update_weights`, or `follow` for a board); each token says which version it came
from. The subtle part is the cache, which holds what old weights computed: no beginning of before is found again, and what
runs either goes on with keys of mixed age (never to be shared), or is read in anew (`recompute`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import KVCacheGroup, KVCacheManager
from whorl.engine.config import EngineConfig
from whorl.engine.model.batch_builder import build_batch, scores_prompt
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.model.runner import layer_windows
from whorl.engine.native.runner import make_runner
from whorl.engine.postprocess import accept_tokens, score_prompt
from whorl.engine.request import Delta, FinishReason, Request, Token
from whorl.engine.sampling.forced_prefix import ForcedPrefix, Sequenced, SortedVocabulary
from whorl.engine.sampling.sampler import Sampler
from whorl.engine.sampling.stop_strings import StopStringChecker
from whorl.engine.scheduling.prefill_budget import PrefillBudget
from whorl.engine.scheduling.scheduler import Schedule, Scheduler
from whorl.engine.sequence import Sequence, SequenceStatus
from whorl.engine.stats import EngineStats
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.slots.board import Board
from whorl.tracking.seeds import derive


class Proposer(Protocol):
    """Guesses at what follows (`speculate.py`). wants_hidden: `saw` is of use to it."""

    needs_hidden_states: bool

    def propose(self, sequences: Many[Sequence]) -> None:
        """Fills `drafts` of each."""
        ...

    def observe(self, sequence: Sequence, hidden: Tensor) -> None:
        """hidden: [n, d_model] of the positions that were computed last, wrong guesses left out."""
        ...

    def release(self, sequence: Sequence) -> None:
        """It is finished."""
        ...


class Engine:
    """See the top of this file.

    Args:
        model: in its compute type, on its device.
        config: sizes.
        token_bytes: the bytes of each id, to make text of; without them `Delta.text` stays empty.
        forbidden: ids that are never drawn (pad, bos, rows that only round the matrix up).
        proposer: of drafts.
        compile_grammar: makes a matcher of a `Grammar`; without it such requests are refused.
        adapters: LoRA adapters of `model` that requests may name (`adapters.py`).
        clock: seconds.

    Raises:
        ConfigError: a model that cannot be run; texts longer than it can take.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig | None = None,
        *,
        token_bytes: Many[bytes] = (),
        banned_ids: Many[int] = (),
        proposer: Proposer | None = None,
        compile_grammar: Callable[[Any], Any] | None = None,
        adapters: Adapters | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config = config or EngineConfig()
        self.model, self.token_bytes, self.proposer, self.clock = model, token_bytes, proposer, clock
        self.compile_grammar = compile_grammar
        self.adapters = Adapters(model) if adapters is None else adapters
        self.adapters.names_in_use = lambda: {s.request.adapter for s in self._sequences.values()}
        self.max_model_len = (
            config.max_model_len
            if model.max_positions is None
            else min(config.max_model_len, model.max_positions)
        )
        if config.batch_invariant and proposer is not None:
            raise ConfigError(
                "batch_invariant is given with drafts, which change the size of products",
                expected="one of both",
            )
        windows = layer_windows(model)
        tokens = config.kv_cache_tokens or max(
            self.max_model_len, config.max_num_seqs * self.max_model_len // 2
        )
        pages: dict[int | None, int] = {}
        for window in {w for w in windows if w != -1} or {None}:
            n = tokens
            if window is not None:  # what all hold at once, and beginnings to be found again
                held = (
                    config.max_num_seqs * (window + config.block_size)
                    + config.max_num_batched_tokens
                    + window
                )
                n = min(tokens, held + tokens // 4)
            pages[window] = max(1, -(-n // config.block_size))
        same = config.batch_invariant
        self.runner = make_runner(
            model, pages, config.block_size, config.max_num_seqs, self.max_model_len,
            weight_dtype=config.weight_dtype, weight_group_size=config.weight_group_size, invariant=same,
            dtype=torch.int8 if config.kv_cache_dtype == "int8" else None, adapters=self.adapters,
        )  # fmt: skip
        groups = [
            KVCacheGroup(w, BlockPool(pages[w], config.block_size)) for w in self.runner.windows or [None]
        ]
        share = config.enable_prefix_caching and not self.runner.has_recurrent_layers
        self.cache = KVCacheManager(
            groups, config.max_num_seqs, self.max_model_len, config.max_num_batched_tokens, share, not same
        )
        self.prefill_budget = PrefillBudget(config.max_decode_slowdown, config.slo_tpot)
        swaps = (
            same or config.preemption == "swap"
        )  # what is read in anew is computed in other pieces than it was
        self.scheduler = Scheduler(
            self.cache, config.max_num_seqs, config.max_num_batched_tokens, self.prefill_budget, same,
            self.runner.swap_out if swaps else None, self.runner.swap_in if swaps else None,
        )  # fmt: skip
        self.sampler = Sampler(model.config.vocab_size, banned_ids, str(model.embedding.device))
        self.version = 0
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Delta] = []
        self._n_added = 0
        self._board: Board | None = None
        self._max_positions = self._max_cacheable_positions()

    @cached_property
    def _sorted_vocabulary(self) -> SortedVocabulary:
        return SortedVocabulary(self.token_bytes, self.model.config.vocab_size)

    # -- what is asked -------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sequences or self._aborted)

    @property
    def max_positions(self) -> int:
        """Positions that a text may have here, prompt and output: by the model, the settings and the cache."""
        return self._max_positions

    def add(self, request: Request) -> None:
        """Takes a request in.

        Raises:
            ConfigError: it cannot be served by this model and this cache; the field is named.
        """
        vocab, n = self.model.config.vocab_size, len(request.ids)
        if request.id in self._sequences:
            raise ConfigError(f"id {request.id!r} is that of a request on its way", expected="a new one")
        if max(request.ids) >= vocab:
            raise ConfigError(
                f"ids: {max(request.ids)} is no id of this model",
                expected=f"0 to {vocab - 1}",
                do="encode with its own tokenizer",
            )
        if n >= self._max_positions:
            what = "the model's context" if self._max_positions == self.max_model_len else "the cache"
            raise ConfigError(
                f"ids: the prompt is {n:,} tokens long and {what} holds {self._max_positions:,}",
                expected=f"at most {self._max_positions - 1:,}, so that one can be written",
            )
        request.sampling.check_ids(vocab)
        if request.grammar is not None and self.compile_grammar is None:
            raise ConfigError(
                "grammar is given, and this engine has no grammars", expected="a request without"
            )
        if request.forced_prefix and not self.token_bytes:
            raise ConfigError(
                "forced_prefix is given, and the engine has no token_bytes", expected="a request without"
            )
        self.adapters.index_of(request.adapter)  # which says so if there is none
        self._n_added += 1
        seed = (
            request.sampling.seed
            if request.sampling.seed is not None
            else derive(self.config.seed, "request", request.id)
        )
        sequence = Sequence(request, self._n_added, list(request.ids), seed, self._hash_seed(request))
        sequence.stop_checker = StopStringChecker(request.stop)
        if request.grammar is not None and self.compile_grammar is not None:
            sequence.constraint = self.compile_grammar(request.grammar)
        if request.forced_prefix:
            exact = sequence.constraint is not None
            begin = ForcedPrefix(self._sorted_vocabulary, request.forced_prefix, exact)
            sequence.constraint = Sequenced(begin, sequence.constraint) if exact else begin
        sequence.arrival_time = self.clock()
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """Ends a request where it is; the next step says so. False if it is not (or no longer) on its way."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        self._aborted.append(Delta(request_id, finish_reason="abort"))
        return True

    def step(self) -> list[Delta]:
        """One step of the model: -> what it did, request by request; [] when there is nothing to do."""
        began = self.clock()
        deltas, self._aborted = self._aborted, []
        if self._board is not None:
            self.sync_weights(self._board)
        if self.proposer is not None:
            self.proposer.propose([s for s in self.scheduler.running if s.decoding and s.constraint is None])
        schedule = self.scheduler.schedule()
        if not schedule.rows:
            return deltas
        batch, rows = build_batch(
            schedule, self.cache, self.runner.ngram_context, self.model.embedding.device
        )
        batch.adapter_indices = self.adapters.indices_of(s.request.adapter for s, _ in schedule.rows)
        ready = self.clock()
        hidden: Tensor | None = None
        if self.proposer is not None and self.proposer.needs_hidden_states:
            hidden = self.runner.hidden(batch)
            logits = self.runner.logits(hidden[batch.logit_indices])
        else:
            logits = self.runner.run(batch)
        ran = self.clock()
        drawn = self.sampler.sample_or_none(
            logits if batch.sample_indices is None else logits[batch.sample_indices], rows
        )
        sampled = self.clock()
        before = [(sequence, sequence.n_computed) for sequence, _ in schedule.rows]
        deltas += self._process_outputs(schedule, logits, drawn)
        if hidden is not None and self.proposer is not None:
            for (sequence, first), at in zip(before, batch.starts, strict=False):
                if sequence.finish_reason is None:
                    self.proposer.observe(sequence, hidden[at : at + sequence.n_computed - first])
        n_decode = schedule.decode_tokens
        done = self.clock()
        self.prefill_budget.record_step(n_decode, schedule.tokens - n_decode, done - began)
        self.stats.record_step(
            began, schedule, n_decode, model_seconds=ran - ready, sample_seconds=sampled - ran, seconds=done - began,
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
        )  # fmt: skip
        return deltas

    def update_weights(self, tensors: Mapping[str, Tensor], version: int, recompute: bool = False) -> None:
        """New weights from the next step on.

        Args:
            tensors: by parameter name, all or some of them.
            recompute: read in anew what runs, rather than going on with keys of the old weights.

        Raises:
            ConfigError: a name or a shape that the model does not have; nothing has changed then.
        """
        own = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                have = "no such parameter" if name not in own else f"{list(own[name].shape)}"
                raise ConfigError(f"weights: {name} is {list(tensor.shape)}", expected=have)
        with torch.no_grad():
            for name, tensor in tensors.items():
                own[name].copy_(tensor)
        self._on_weights_updated(version, recompute)

    def follow_board(self, board: Board | None) -> None:
        """Takes the newest weights of `board` before each step; None: goes on with those that it has."""
        self._board = board

    def sync_weights(self, board: Board) -> None:
        """Takes the newest weights of `board` now, unless it has them."""
        if board.version != self.version:
            with torch.no_grad():
                version = board.read(dict(self.model.named_parameters()))
            self._on_weights_updated(version)

    def check_integrity(self) -> None:
        """Raises RuntimeError when books, queues and sequences disagree: a leaked page, a lost request."""
        self.scheduler.check_integrity(self._sequences.values())

    def sequences(self) -> list[Sequence]:
        """All that are on their way."""
        return list(self._sequences.values())

    # -- one step ------------------------------------------------------------------------------------------------------

    def _process_outputs(self, schedule: Schedule, logits: Tensor, drawn: list[Token | None]) -> list[Delta]:
        """Takes the drawn tokens in; -> what is told of each sequence that got further."""
        deltas = []
        at = row = 0  # in `logits`, in `drawn`
        for sequence, n in schedule.rows:
            stop = sequence.n_computed + n
            told: tuple[float, ...] = ()
            if scores_prompt(sequence):
                score_prompt(sequence, logits[at : at + n], stop)
                at += n
                count = int(stop == len(sequence.ids))
                told = tuple(sequence.prompt_log_probs) if count else ()
            else:
                count = max(0, stop - len(sequence.ids) + 1)
                at += count
                if count and sequence.request.prompt_log_probs and not sequence.n_output:
                    told = tuple(sequence.prompt_log_probs)  # its last position was a step of its own
            new = drawn[row : row + count]
            row += count
            pages = sequence.n_computed // self.config.block_size
            sequence.n_computed = min(stop, len(sequence.ids))
            delta = self._accept_tokens(sequence, new, told) if new else None
            if sequence.n_computed // self.config.block_size > pages or self.cache.has_windows:
                self.cache.commit_full_pages(sequence)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    del self._sequences[sequence.request.id]
                    self._finish(sequence, delta.finish_reason)
        return deltas

    def _accept_tokens(
        self, sequence: Sequence, drawn: list[Token | None], prompt_log_probs: tuple[float, ...]
    ) -> Delta:
        first = sequence.n_output == 0
        if first:
            sequence.first_token_time = self.clock()
        n_drafts = len(sequence.drafts)
        taken, text, finish = accept_tokens(
            sequence, drawn, self.token_bytes, self._max_positions, self.version
        )
        self.stats.output_tokens += len(taken)
        if n_drafts:
            self.stats.drafted_tokens += n_drafts
            self.stats.accepted_tokens += max(0, len(taken) - 1)
        cached = sequence.cached_tokens if first else 0
        return Delta(sequence.request.id, tuple(taken), text, finish, cached, prompt_log_probs)

    def _finish(self, sequence: Sequence, finish: FinishReason) -> None:
        sequence.finish_reason = finish
        self.scheduler.remove(sequence)
        if self.proposer is not None:
            self.proposer.release(sequence)
        self.stats.finished[finish] = self.stats.finished.get(finish, 0) + 1

    # -- weights and sizes ---------------------------------------------------------------------------------------------

    def _on_weights_updated(self, version: int, recompute: bool = False) -> None:
        """The model's weights are others now."""
        self.runner.refresh()
        self.version = version
        self.cache.invalidate_all()
        if recompute:
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence)
        for sequence in self._sequences.values():
            sequence.page_hashes = []
            sequence.n_committed_pages = 0
            fresh = sequence.status is SequenceStatus.WAITING and sequence.swapped is None
            mixed = f"mixed {sequence.arrival_index} ".encode() if not fresh else b""
            sequence.hash_seed = mixed + self._hash_seed(sequence.request)

    def _hash_seed(self, request: Request) -> bytes:
        return f"{self.version} {self.adapters.cache_key(request.adapter)} ".encode()

    def _max_cacheable_positions(self) -> int:
        """The longest text that the cache could hold, were it alone."""
        low, high = 0, self.max_model_len
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cache.fits(middle) else (low, middle - 1)
        return low
