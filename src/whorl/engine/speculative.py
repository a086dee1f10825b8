"""Speculation: cheap guesses at what follows, verified by the model several at a time.

A step of decoding reads all weights to make one token. A few more positions of the same row cost hardly more (Leviathan et
al. 2023, Fast Inference from Transformers via Speculative Decoding, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318):
so guesses that often come true are tokens for nothing. Who guesses is a `Proposer` of the engine:

- `Lookup`: what followed the last time that the newest few ids stood in this text (prompt look-up, Saxena 2023; in code and
  in answers that quote, much is said again). Costs a dictionary.
- `DraftModel`: a smaller model with the same ids.
- `Ahead`: heads that were trained to predict several tokens on (`models/multi_token.py`, arXiv:2404.19737).

How a guess is verified is the engine's business, and simpler than in the papers: every position's token is drawn from the
model's own distribution with the random number of its place, and a guess is kept if it is what was drawn. For a guess x that
is certain of itself this *is* the papers' rule: it is accepted with probability p(x), and what comes instead follows p
without x. It is lossless in a stronger sense than theirs: not only the distribution, the very tokens are those of the same
seed without speculation. `DraftModel` wins back what the papers gain by drafting from a distribution: it draws with the same
random numbers, so where both distributions are alike, both draw the same.

The subtle part is when not to guess: a guess costs a position of the step. `Patience` follows, for each sequence, how many
of its guesses came true, and doubles or halves how far it looks; one whose guesses fail is asked again only now and then.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import torch
from torch import Tensor

from whorl.engine.cache.block_pool import BlockPool
from whorl.engine.cache.cache_manager import Cache, Group
from whorl.engine.model.batch_builder import assemble
from whorl.engine.model.runner import Runner, windows_of
from whorl.engine.sampling.sampler import Sampler
from whorl.engine.scheduling.scheduler import Schedule
from whorl.engine.sequence import Sequence, Status
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.models.multi_token import MultiToken
from whorl.nn.attention.state import KeyValueState

LONGEST_KEY, SHORTEST_KEY = 4, 2  # ids that `Lookup` looks for
PAUSE = 16  # tokens without guesses after they failed


@dataclass
class Patience:
    """How far to guess for one sequence: 1 .. most, or 0 while it rests."""

    most: int
    far: int = 0
    rest: int = 0
    seen: int = 0  # tokens of the sequence when it was last looked at
    asked: int = 0

    def look(self, n_output: int) -> int:
        """Guesses that are worth making now, `n_output` tokens having been written."""
        written, self.seen = n_output - self.seen, n_output
        if self.asked:  # the last guesses: all but the last of what was written then came true
            right = min(written - 1, self.asked)
            if right == self.asked:
                self.far = min(self.most, 2 * self.far)
            elif right * 2 < self.asked:
                self.far = self.far // 2
            self.rest = 0 if self.far else PAUSE
            self.asked = 0
        elif self.rest:
            self.rest = max(0, self.rest - written)
        if not self.rest and not self.far:
            self.far = min(2, self.most)
        return 0 if self.rest else self.far


@dataclass
class _Known:
    """Where each run of ids ended last: (ids) -> position behind it; how many positions were entered."""

    patience: Patience
    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    entered: int = 0


class Lookup:
    """Guesses from the sequence's own text.

    Args:
        most: guesses a step.
    """

    wants_hidden = False

    def __init__(self, most: int = 8) -> None:
        self.most = most
        self._known: dict[int, _Known] = {}

    def propose(self, sequences: Many[Sequence]) -> None:
        for sequence in sequences:
            known = self._known.setdefault(sequence.arrival, _Known(Patience(self.most)))
            far = min(known.patience.look(sequence.n_output), _room(sequence))
            sequence.drafts = self._find(known, sequence.ids, far) if far > 0 else []
            known.patience.asked = len(sequence.drafts)

    def _find(self, known: _Known, ids: list[int], far: int) -> list[int]:
        # The newest position is not entered yet: it would find itself.
        for stop in range(max(known.entered, 1), len(ids)):
            for n in range(SHORTEST_KEY, LONGEST_KEY + 1):
                if stop >= n:
                    known.places[tuple(ids[stop - n : stop])] = stop
        known.entered = max(known.entered, len(ids))
        for n in range(LONGEST_KEY, SHORTEST_KEY - 1, -1):
            at = known.places.get(tuple(ids[-n:])) if len(ids) >= n else None
            if at is not None:
                found = ids[at : at + far]
                while 0 < len(found) < far:  # it repeats itself: and so do we
                    found += found[: far - len(found)]
                return found
        return []

    def saw(self, sequence: Sequence, hidden: Tensor) -> None:
        """Nothing to learn from."""

    def forget(self, sequence: Sequence) -> None:
        self._known.pop(sequence.arrival, None)


def _room(sequence: Sequence) -> int:
    """Guesses that could still be of use before the output's end."""
    return sequence.request.max_tokens - sequence.n_output - 1


class DraftModel:
    """Guesses by a smaller model with the same vocabulary.

    Args:
        model: in its compute type.
        most: guesses a step.
        max_sequences, max_length, page_size: as the engine's.
        forbidden: ids that are never drawn.

    Raises:
        ConfigError: a model whose layers keep a state of fixed size, which cannot be taken back by a position.
    """

    wants_hidden = False

    def __init__(
        self,
        model: LanguageModel,
        most: int = 4,
        *,
        max_sequences: int = 32,
        max_length: int = 2048,
        page_size: int = 32,
        forbidden: Many[int] = (),
    ) -> None:
        if any(w is not None for w in windows_of(model)):
            raise ConfigError(
                "the draft model has windows or states of fixed size", expected="full attention"
            )
        pages = max_sequences * -(-(max_length + most) // page_size)
        self.model, self.most = model, most
        self.runner = Runner(model, {None: pages}, page_size, max_sequences, max_length + most)
        group = Group(None, BlockPool(pages, page_size))
        self.cache = Cache([group], max_sequences, max_length + most, max_length, share=False)
        self.sampler = Sampler(model.config.vocab_size, forbidden, str(model.embedding.device))
        self._free = list(range(max_sequences))
        self._twins: dict[int, Sequence] = {}
        self._patience: dict[int, Patience] = {}

    def propose(self, sequences: Many[Sequence]) -> None:
        wanted: list[tuple[Sequence, Sequence, int]] = []
        for sequence in sequences:
            patience = self._patience.setdefault(sequence.arrival, Patience(self.most))
            far = min(patience.look(sequence.n_output), _room(sequence))
            if far > 0 and (twin := self._twin(sequence)) is not None:
                wanted.append((sequence, twin, far))
            sequence.drafts = []
        for k in range(max((far for _, _, far in wanted), default=0)):
            rows = [(s, twin) for s, twin, far in wanted if k < far]
            for (sequence, twin), token in zip(rows, self._draw([t for _, t in rows]), strict=True):
                sequence.drafts.append(token)
                twin.ids.append(token)
        for sequence, twin, _ in wanted:
            self._patience[sequence.arrival].asked = len(sequence.drafts)
            # What is right of this, the next look will see: up to there the cache stays as it is.
            twin.computed = min(twin.computed, len(sequence.ids))

    def _twin(self, sequence: Sequence) -> Sequence | None:
        """The sequence as the draft model knows it, brought up to date."""
        twin = self._twins.get(sequence.arrival)
        if twin is None:
            if not self._free:
                return None
            twin = Sequence(sequence.request, sequence.arrival, [], sequence.seed)
            twin.status, twin.slot, twin.pages = Status.RUNNING, self._free.pop(), [[]]
            self._twins[sequence.arrival] = twin
        same = 0  # positions whose ids are what they were when they were computed
        most = min(twin.computed, len(sequence.ids) - 1)
        start = max(0, most - self.most - 1)  # only what was a guess can have turned out otherwise
        same = start
        while same < most and twin.ids[same] == sequence.ids[same]:
            same += 1
        twin.computed, twin.ids = same, list(sequence.ids)
        return twin

    def _draw(self, twins: list[Sequence]) -> list[int]:
        schedule = Schedule([(t, t.to_read) for t in twins])
        order = {id(t): n for n, t in enumerate(twins)}
        for t in twins:
            self.cache.grow(t, len(t.ids))
        batch, rows = assemble(schedule, self.cache, self.runner.reach, self.model.embedding.device)
        drawn = self.sampler(self.runner.run(batch), rows)
        out = [0] * len(twins)
        for (twin, _), token in zip(schedule.rows, drawn, strict=True):
            twin.computed = len(twin.ids)
            out[order[id(twin)]] = token.id
        return out

    def saw(self, sequence: Sequence, hidden: Tensor) -> None:
        """Nothing to learn from."""

    def forget(self, sequence: Sequence) -> None:
        self._patience.pop(sequence.arrival, None)
        twin = self._twins.pop(sequence.arrival, None)
        if twin is not None:
            self.cache.release(twin)
            self._free.append(twin.slot)


class Ahead:
    """Guesses by heads that look several tokens on from the trunk's hidden states.

    Args:
        heads: trained with the model; the first predicts what the model itself does, the others guess.
        output: [vocab, d_model], the model's output matrix.
        max_length: positions of one text.
    """

    wants_hidden = True

    def __init__(self, heads: MultiToken, output: Tensor, max_length: int = 2048) -> None:
        if heads.n < 2:
            raise ConfigError("heads look 1 token ahead, as the model does", expected="at least 2")
        self.heads, self.output, self.max_length = heads, output, max_length
        self._states: dict[int, list[KeyValueState]] = {}
        self._guesses: dict[int, list[int]] = {}
        self._patience: dict[int, Patience] = {}

    def propose(self, sequences: Many[Sequence]) -> None:
        for sequence in sequences:
            patience = self._patience.setdefault(sequence.arrival, Patience(self.heads.n - 1))
            far = min(patience.look(sequence.n_output), _room(sequence))
            sequence.drafts = self._guesses.get(sequence.arrival, [])[: max(0, far)]
            patience.asked = len(sequence.drafts)

    @torch.inference_mode()
    def saw(self, sequence: Sequence, hidden: Tensor) -> None:
        """hidden: [n, d_model] of the newest computed positions, those of wrong guesses left out."""
        n, stop = len(hidden), sequence.computed
        states = self._states.get(sequence.arrival)
        if states is None or states[0].length + n > states[0].capacity:
            device = str(hidden.device)
            states = self.heads.new_state(1, self.max_length, dtype=self.heads.dtype, device=device)
            self._states[sequence.arrival] = states
        positions = torch.arange(stop - n, stop, device=hidden.device)[None]
        drafts = self.heads.draft(hidden[None].to(self.heads.dtype), self.output, positions, states)
        # The first head says again what the model has said with its own head.
        self._guesses[sequence.arrival] = drafts[0, 1:].tolist()

    def forget(self, sequence: Sequence) -> None:
        for kept in (self._states, self._guesses, self._patience):
            kept.pop(sequence.arrival, None)
