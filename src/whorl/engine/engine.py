"""The engine: requests in, one model step at a time, tokens out. Serving, rollouts and scoring all use it.

    engine = Engine(model, EngineConfig(), token_bytes=..., banned_ids=...)
    completions = engine.generate([[1, 2, 3]], SamplingParams(temperature=0), max_tokens=20)

    engine.add(Request(id="a", ids=(1, 2, 3)))              # the same, step by step
    while engine.busy:
        for delta in engine.step(): ...

In each step the scheduler selects rows, `build_batch` makes an `InputBatch`, the runner computes logits, and the sampler
draws tokens. `step` returns one `Delta` per sequence that advanced. The engine neither blocks nor starts threads.

Drafts. A sequence may have draft tokens (`speculation/proposers.py`). They are computed as extra positions of its row. Every
position's token is then sampled as if there were no drafts, with the random number of that position. Drafts are kept as
long as they equal the sampled tokens. So drafts never change a token: the same seed gives the same text with and without.

Weights change between two steps (`update_weights`, or `follow_board`). Each token carries its weight version. The subtle
point is the KV cache: cached prefixes are invalidated; running sequences keep a KV cache computed by a mix of weight
versions, which is never shared, or are recomputed (`recompute=True`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from whorl.engine.build import context_length, make_burst, make_runner_and_cache, make_sampler
from whorl.engine.canvas import WHOLE, canvas_config, certainties, check_request, open_canvases, reveal
from whorl.engine.config import EngineConfig
from whorl.engine.generation import generate, stream
from whorl.engine.model.batch_builder import build_batch
from whorl.engine.model.multi_lora import Adapters
from whorl.engine.postprocess import accept_tokens, store_scores
from whorl.engine.request import Delta, FinishReason, Generation, Request, Token
from whorl.engine.sampling.forced_prefix import ForcedPrefix, Sequenced, SortedVocabulary
from whorl.engine.sampling.stop_strings import StopStringChecker
from whorl.engine.sampling_params import SamplingParams
from whorl.engine.scheduler import PrefillBudget, Schedule, Scheduler
from whorl.engine.sequence import PromptScores, Proposer, Sequence, SequenceStatus
from whorl.engine.stats import EngineStats
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.slots.board import Board
from whorl.tracking.seeds import derive


class Engine:
    """Runs many requests through one model, step by step.

    Args:
        model: in its compute dtype, on its device.
        config: sizes and scheduling limits.
        token_bytes: the bytes of each id; without them `Delta.text` stays empty.
        banned_ids: ids that are never sampled (pad, bos, padding rows of the output matrix).
        proposer: makes draft tokens.
        compile_grammar: compiles a `Grammar` to a `LogitConstraint`; without it, requests with a grammar are rejected.
        adapters: LoRA adapters of `model` that requests may name (`multi_lora.py`).
        compile_native: compile the native step now if that has not been done on this machine (seconds, once).
        clock: seconds.

    Raises:
        ConfigError: the engine cannot run the model, or the sequences are too long for it.
    """

    def __init__(
        self,
        model: LanguageModel,
        config: EngineConfig | None = None,
        *,
        token_bytes: SequenceABC[bytes] = (),
        banned_ids: SequenceABC[int] = (),
        proposer: Proposer | None = None,
        compile_grammar: Callable[[Any], Any] | None = None,
        adapters: Adapters | None = None,
        compile_native: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.masked = model.config.masked  # of a masked diffusion model (`canvas.py`)
        self.config = config = canvas_config(config or EngineConfig(), self.masked, proposer is not None)
        self.model, self.token_bytes, self.proposer, self.clock = model, token_bytes, proposer, clock
        self.compile_grammar = compile_grammar
        self.adapters = Adapters(model) if adapters is None else adapters
        self.adapters.names_in_use = lambda: {s.request.adapter for s in self._sequences.values()}
        self.max_model_len = context_length(model, config)
        if config.batch_invariant and proposer is not None:
            raise ConfigError(
                "batch_invariant is set together with a proposer; drafts change the sizes of matrix products",
                expected="only one of the two",
            )
        self.runner, self.cache = make_runner_and_cache(
            model, config, self.max_model_len, self.adapters, compile_native=compile_native
        )
        same = config.batch_invariant
        self.prefill_budget = PrefillBudget(config.max_decode_slowdown, config.slo_tpot)
        # Recomputation would split the positions differently, and so change bits.
        swaps = same or config.preemption == "swap"
        self.scheduler = Scheduler(
            self.cache, config.max_num_seqs, config.max_num_batched_tokens, self.prefill_budget, same,
            self.runner.swap_out if swaps else None, self.runner.swap_in if swaps else None,
        )  # fmt: skip
        ids = [] if self.masked is None else [self.masked.mask_id]
        self.sampler = make_sampler(self.runner, [*banned_ids, *ids])
        self.version = 0
        self.stats = EngineStats()
        self._sequences: dict[str, Sequence] = {}
        self._aborted: list[Delta] = []
        self._n_added = self._n_generated = 0
        self._board: Board | None = None
        self._block = 1 if self.masked is None else self.masked.block or WHOLE
        self._max_positions = self.cache.longest_sequence()
        if self._block < WHOLE:
            self._max_positions -= self._max_positions % self._block
        self.burst = make_burst(self.runner, self.cache, config, self.sampler, self._max_positions)

    @cached_property
    def _sorted_vocabulary(self) -> SortedVocabulary:
        return SortedVocabulary(self.token_bytes, self.model.config.vocab_size)

    # -- requests ------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._sequences or self._aborted)

    @property
    def max_positions(self) -> int:
        """Maximum positions of a sequence (prompt and output) that the model, the settings and the cache allow."""
        return self._max_positions

    def add(self, request: Request) -> None:
        """Add a request.

        Raises:
            ConfigError: this model or this cache cannot serve it; the message names the field.
        """
        if request.id in self._sequences:
            raise ConfigError(
                f"id {request.id!r} is the id of an unfinished request", expected="an unused id"
            )
        check_request(request, self.masked)
        request.check(
            self.model.config.vocab_size, self._max_positions,
            "the model's context" if self._max_positions == self.max_model_len else "the cache",
            can_compile_grammars=self.compile_grammar is not None, has_token_bytes=bool(self.token_bytes),
        )  # fmt: skip
        self.adapters.index_of(request.adapter)  # raises if there is no such adapter
        self._n_added += 1
        seed = (
            request.sampling.seed
            if request.sampling.seed is not None
            else derive(self.config.seed, "request", request.id)
        )
        sequence = Sequence(
            request, self._n_added, list(request.ids[: request.n_prefilled]), seed, self._hash_seed(request)
        )
        sequence.block, sequence.stop_checker = self._block, StopStringChecker(request.stop)
        if request.grammar is not None and self.compile_grammar is not None:
            sequence.constraint = self.compile_grammar(request.grammar)
        if request.forced_prefix:
            exact = sequence.constraint is not None
            prefix = ForcedPrefix(self._sorted_vocabulary, request.forced_prefix, exact)
            sequence.constraint = Sequenced(prefix, sequence.constraint) if exact else prefix
        self._sequences[request.id] = sequence
        self.scheduler.add(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request; the next step returns its last `Delta`. Returns False if the request is unknown or finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        self._finish(sequence, "abort")
        self._aborted.append(Delta(request_id, finish_reason="abort"))
        return True

    def step(self) -> list[Delta]:
        """Run one step of the model; returns one `Delta` per request that advanced, or [] if there is nothing to do."""
        started = self.clock()
        deltas, self._aborted = self._aborted, []
        if self._board is not None:
            self.sync_weights(self._board)
        if self.proposer is not None:
            drafting = [s for s in self.scheduler.running if s.decoding and s.constraint is None]
            with self.stats.timed_drafts(self.clock):
                self.proposer.propose(drafting)
        if self.masked is not None:
            open_canvases(self.scheduler.running, self.masked.mask_id, self._max_positions)
        schedule = self.scheduler.schedule()
        if not schedule.rows:
            return deltas
        batch, rows = build_batch(schedule, self.cache, self.runner.ngram_context)
        batch.adapter_indices = self.adapters.indices_of(s.request.adapter for s, _ in schedule.rows)
        ready = self.clock()
        several = None
        if self.burst is not None and self.proposer is None and self._board is None:
            several = self.burst.run(schedule, batch, rows, self.scheduler)
        needs_hidden = self.proposer is not None and self.proposer.needs_hidden_states
        out = None if several else self.runner.run_step(batch, needs_hidden=needs_hidden)
        model_done = self.clock()
        sampled_tokens, certainty = several or [], None
        if out is not None:
            sampled_tokens = self.sampler.sample_or_none(out.logits, rows) if rows else []
            store_scores(schedule, out.scores)
            if self.masked is not None:
                certainty = certainties(out.logits, rows, self.sampler.is_banned)
        sample_done = self.clock()
        before = [(sequence, sequence.n_computed) for sequence, _ in schedule.rows]
        deltas += self._process_outputs(schedule, sampled_tokens, certainty)
        if out is not None and out.hidden is not None and self.proposer is not None:
            with self.stats.timed_drafts(self.clock):
                for (sequence, first), at in zip(before, batch.starts, strict=False):
                    if sequence.finish_reason is None:
                        self.proposer.observe(sequence, out.hidden[at : at + sequence.n_computed - first])
        n_decode = schedule.decode_tokens
        done = self.clock()
        if not several:
            self.prefill_budget.record_step(n_decode, schedule.tokens - n_decode, done - started)
        self.stats.record_step(
            started, schedule, n_decode, model_seconds=model_done - ready, sample_seconds=sample_done - model_done,
            seconds=done - started, running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
        )  # fmt: skip
        return deltas

    def stream(self, requests: SequenceABC[Request]) -> Iterator[Delta]:
        """Add `requests` and yield their deltas until all have ended. Requests are aborted when the caller stops reading.

        Raises:
            ConfigError: the engine runs other requests, whose deltas would be lost; or as `add`.
        """
        return stream(self, requests)

    def generate(
        self,
        prompts: SequenceABC[SequenceABC[int]],
        params: SamplingParams | SequenceABC[SamplingParams] = SamplingParams(),  # noqa: B008  (frozen)
        *,
        max_tokens: int = 256,
        stop: SequenceABC[bytes] = (),
        stop_ids: Collection[int] = (),
        forced_prefixes: SequenceABC[bytes] = (),
        top_log_probs: int = 0,
    ) -> list[Generation]:
        """Return the completions of `prompts` (ids, at least one each), in order.

        Args:
            params: for all prompts, or one for each. A seed for all is that of prompt 0, and prompt n has seed + n.
            max_tokens: the engine's room for a sequence may allow fewer.
            stop, stop_ids, top_log_probs: as in `Request`.
            forced_prefixes: one for each prompt, as in `Request`.

        Raises:
            ConfigError: the engine cannot serve a prompt; the index of one that is too long is named.
        """
        self._n_generated += len(prompts)
        return generate(
            self, prompts, params, first_id=self._n_generated - len(prompts), max_tokens=max_tokens,
            forced_prefixes=forced_prefixes, stop=tuple(stop), stop_ids=frozenset(stop_ids),
            top_log_probs=top_log_probs,
        )  # fmt: skip

    def update_weights(self, tensors: Mapping[str, Tensor], version: int, recompute: bool = False) -> None:
        """Use new weights from the next step on.

        Args:
            tensors: by parameter name, all or some of the parameters.
            version: number of the new weights.
            recompute: preempt and recompute running sequences instead of keeping KV of the old weights.

        Raises:
            ConfigError: a name or a shape that the model does not have; nothing has changed then.
        """
        parameters = dict(self.model.named_parameters())
        for name, tensor in tensors.items():
            if name not in parameters or parameters[name].shape != tensor.shape:
                have = "no such parameter" if name not in parameters else f"{list(parameters[name].shape)}"
                raise ConfigError(f"weights: {name} is {list(tensor.shape)}", expected=have)
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(tensor)
        self._on_weights_updated(version, recompute)

    def follow_board(self, board: Board | None) -> None:
        """Read the newest weights of `board` before each step; None keeps the current weights."""
        self._board = board

    def sync_weights(self, board: Board) -> None:
        """Read the newest weights of `board` now if their version differs."""
        if board.version != self.version:
            with torch.no_grad():
                version = board.read(dict(self.model.named_parameters()))
            self._on_weights_updated(version)

    def check_integrity(self) -> None:
        """Raise RuntimeError if page accounting, queues and sequences disagree: a leaked page, a lost request."""
        self.scheduler.check_integrity(self._sequences.values())

    def sequences(self) -> list[Sequence]:
        """Return all unfinished sequences."""
        return list(self._sequences.values())

    # -- one step ------------------------------------------------------------------------------------------------------

    def _process_outputs(
        self, schedule: Schedule, sampled_tokens: list[Token | None], certainty: list[float] | None
    ) -> list[Delta]:
        """Append the sampled tokens; returns one `Delta` per sequence that advanced. certainty: of each, in a canvas."""
        deltas = []
        row = 0  # offset in `sampled_tokens`
        for sequence, n in schedule.rows:
            stop = sequence.n_computed + n
            own = slice(row, row + len(sequence.positions_to_sample(stop)))
            new, row = sampled_tokens[own], own.stop
            pages = sequence.n_computed // self.config.block_size
            sequence.n_computed = min(stop, len(sequence.ids)) // sequence.block * sequence.block
            if certainty is not None and new:
                new = reveal(sequence, new, certainty[own])
            delta = None
            if new or (not sequence.samples and not sequence.n_uncomputed):
                delta = self._accept_tokens(sequence, new)
            if sequence.n_computed // self.config.block_size > pages or self.cache.has_windows:
                self.cache.commit_full_pages(sequence)
            if delta is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    del self._sequences[sequence.request.id]
                    self._finish(sequence, delta.finish_reason)
        return deltas

    def _accept_tokens(self, sequence: Sequence, sampled_tokens: list[Token | None]) -> Delta:
        """Append tokens sampled for a sequence. The first `Delta` has its prompt's scores; a scored text has no other."""
        first = sequence.n_output == 0
        n_drafts, n_forced = len(sequence.drafts), sequence.n_forced
        room = self._max_positions - len(sequence.request.suffix)
        accepted, text, finish = accept_tokens(sequence, sampled_tokens, self.token_bytes, room, self.version)
        self.stats.output_tokens += len(accepted)
        if n_drafts and self.proposer is not None:
            self.stats.drafted_tokens += n_drafts
            self.stats.accepted_tokens += max(0, len(accepted) - 1)
        failed = sequence.constraint.failed if finish == "abort" and sequence.constraint is not None else None
        scores = sequence.scores if first and sequence.scores is not None else PromptScores(0)
        return Delta(
            sequence.request.id, tuple(accepted), text, finish if sequence.samples else "length",
            sequence.cached_tokens if first else 0, tuple(scores.log_probs), sequence.n_forced - n_forced,
            failed or "", tuple(scores.greedy), tuple(scores.alternatives),
        )  # fmt: skip

    def _finish(self, sequence: Sequence, finish: FinishReason) -> None:
        sequence.finish_reason = finish
        self.scheduler.remove(sequence)
        if self.proposer is not None:
            self.proposer.release(sequence)
        self.stats.finished[finish] = self.stats.finished.get(finish, 0) + 1

    # -- weights and sizes ---------------------------------------------------------------------------------------------

    def _on_weights_updated(self, version: int, recompute: bool = False) -> None:
        """Invalidate what depends on the old weights."""
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
