"""An arena over models: draws pairs, requests both answers, and records votes of people or of a judge.

    arena = ModelArena({"small": backend, "large": other}, ArenaLog(path), rng)
    battle = arena.start("Write a haiku about rivers.")         # both answers, without names
    arena.vote(battle.id, "left", voter)                        # names, and ratings before and after

Both answers of a turn are requested at once and returned together, so that the speed does not identify a model. An answer
that does not arrive is recorded with its model and reason, and the battle has no vote.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from whorl.errors import ConfigError, DataError
from whorl.evals.arena.arena_log import ArenaLog, Battle, BattleTurn
from whorl.evals.arena.battles import Battles, Choice, Vote, read_votes
from whorl.evals.arena.bradley_terry import CENTER, fit, unrated
from whorl.evals.arena.options import AnswerSettings, Sampling
from whorl.evals.arena.pair_sampling import DrawnPair, draw_pair
from whorl.evals.arena.standings import PRIOR, Standings, standings
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Message,
    Missing,
    ModelBackend,
    Response,
    responses_of,
)

MAX_SEED = 1 << 31


class AnswerMissingError(DataError):
    """An answer did not arrive. The message names no model: the battle is blind."""


@dataclass(frozen=True)
class VoteOutcome:
    """Names and ratings, after a vote.

    Attributes:
        left, right: models. counted: False if the same vote was there already.
        before, after: points of both models, (left, right).
    """

    left: str
    right: str
    counted: bool
    before: tuple[float, float]
    after: tuple[float, float]


@dataclass
class _Contestant:
    backend: ModelBackend
    lock: threading.Lock = field(default_factory=threading.Lock)  # an engine answers one call at a time


class ModelArena:
    """Battles between models. Its methods may be called from any thread.

    Args:
        models: names, as ratings show them, with their back ends.
        rng: draws pairs, sides and seeds.
        sampling: of pairs; see `pair_sampling.py`.

    Raises:
        ConfigError: fewer than two models, or an impossible sampling.
    """

    def __init__(
        self,
        models: Mapping[str, ModelBackend],
        log: ArenaLog,
        rng: np.random.Generator,
        settings: AnswerSettings | None = None,
        *,
        sampling: Sampling = "uniform",
    ) -> None:
        if len(models) < 2:
            raise ConfigError(f"an arena of {len(models)} models", expected="at least two")
        self.names, self.log, self.settings = tuple(models), log, settings or AnswerSettings()
        locks: dict[int, _Contestant] = {}  # two names may have one engine
        self._models = {
            name: locks.setdefault(id(backend), _Contestant(backend)) for name, backend in models.items()
        }
        self._rng, self._rng_lock = rng, threading.Lock()
        self._sampling: Sampling = sampling
        self._cached: tuple[tuple[int, int], Standings | None] = ((-1, 0), None)
        self._cached_votes: tuple[int, list[Vote]] = (-1, [])
        self._drawn(read_votes([], self.names))  # checks the sampling

    def start(self, prompt: str) -> Battle:
        """Draw two models, request their answers and record them.

        Raises:
            DataError: the prompt is empty. AnswerMissingError: an answer did not arrive.
        """
        _check_prompt(prompt)
        votes = self._votes() if self._sampling == "information" else []
        pair, seed = self._drawn(read_votes(votes, self.names))
        sides = (pair.left, pair.right)
        addresses = (self._models[pair.left].backend.address, self._models[pair.right].backend.address)
        settings = {**self.settings.model_dump(), "seed": seed, "sampling": self._sampling}
        battle = Battle(secrets.token_urlsafe(12), *sides, pair.weight, addresses, settings)
        turn = self._turn(battle, prompt)
        battle = Battle(battle.id, *sides, pair.weight, addresses, settings, (turn,))
        self.log.add_battle(battle)
        return battle

    def go_on(self, battle: str, prompt: str) -> Battle:
        """Continue the conversation of a battle without a vote, with one more prompt.

        Raises:
            DataError: no such battle, it has a vote, or the prompt is empty. AnswerMissingError: as `start`.
        """
        _check_prompt(prompt)
        found = self.log.battle(battle)
        if self.settings.complete:
            raise DataError("these models continue texts", expected="one prompt per battle")
        self.log.add_turn(battle, self._turn(found, prompt))
        return self.log.battle(battle)

    def vote(self, battle: str, choice: Choice, voter: str = "") -> VoteOutcome:
        """Record a vote, and return the names and the ratings before and after it.

        Raises:
            VoteConflictError: the battle has another vote. DataError: no such battle or choice.
        """
        n, before = self.log.n_votes(), self._votes()
        counted = self.log.add_vote(battle, choice, voter)
        found = self.log.battle(battle)
        after = [v for v in before if v.battle != battle]
        old = current_points(after, self.names)
        assert found.vote is not None
        if counted and self.log.n_votes() == n + 1 == len(before) + 1:  # no other vote arrived meanwhile
            self._cached_votes = (n + 1, [*before, found.vote])
        new = current_points([*after, found.vote], self.names)
        sides = (found.left, found.right)
        points = [tuple(values.get(name, CENTER) for name in sides) for values in (old, new)]
        return VoteOutcome(*sides, counted, *points)  # type: ignore[arg-type]

    def standings(self, draws: int = 0) -> Standings | None:
        """Return the standings of all votes between the models, or None without any. They are kept until the next vote.

        draws: of the bootstrap; 0 leaves it out.
        """
        key = (self.log.n_votes(), draws)
        if not any(v.left in self.names and v.right in self.names for v in self._votes()):
            return None  # the log may have votes between other models
        if self._cached[0] != key:
            self._cached = (key, standings(self._votes(), self.names, draws=draws))
        return self._cached[1]

    def _votes(self) -> list[Vote]:
        """Return all votes, read again if there are new ones, also of another process."""
        n = self.log.n_votes()
        if self._cached_votes[0] != n:
            self._cached_votes = (n, self.log.votes())
        return self._cached_votes[1]

    def _drawn(self, battles: Battles) -> tuple[DrawnPair, int]:
        with self._rng_lock:
            pair = draw_pair(battles, self._rng, self._sampling)
            return pair, int(self._rng.integers(MAX_SEED))

    def _turn(self, battle: Battle, prompt: str) -> BattleTurn:
        sides = (battle.left, battle.right)
        with ThreadPoolExecutor(2, thread_name_prefix="whorl-arena") as pool:
            left, right = pool.map(lambda side: self._answer(battle, sides[side], side, prompt), (0, 1))
        missing = [(m, a.reason) for m, a in zip(sides, (left, right), strict=True) if isinstance(a, Missing)]
        for model, reason in missing:
            self.log.add_missing(battle.id, model, reason)
        if not isinstance(left, Completion) or not isinstance(right, Completion):
            raise AnswerMissingError("an answer did not arrive", do="try again, or start a new battle")
        return BattleTurn(prompt, left.text, right.text, left.finish, right.finish)

    def _answer(self, battle: Battle, model: str, side: int, prompt: str) -> Response:
        s = self.settings
        request = GenerateRequest(
            prompt if s.complete else self._messages(battle, side, prompt), s.max_tokens, s.stop, s.temperature, s.top_p,
            battle.settings["seed"],
        )  # fmt: skip
        one = self._models.get(model)
        if one is None:
            return Missing("the model is not in the arena any more")
        with one.lock:
            return responses_of(one.backend, [request])[0]

    def _messages(self, battle: Battle, side: int, prompt: str) -> tuple[Message, ...]:
        messages: list[Message] = (
            [{"role": "system", "content": self.settings.system}] if self.settings.system else []
        )
        for turn in battle.turns:
            answer = (turn.left, turn.right)[side]
            messages += [{"role": "user", "content": turn.prompt}, {"role": "assistant", "content": answer}]
        return (*messages, {"role": "user", "content": prompt})


def current_points(votes: Sequence[Vote], models: Sequence[str]) -> dict[str, float]:
    """Return the points of each model: with a prior where there is no finite rating, and 1000 without votes."""
    battles = read_votes(votes, models)
    if not battles.n_votes:
        return dict.fromkeys(models, CENTER)
    found = fit(battles, PRIOR if unrated(battles) else 0.0)
    return dict(zip(models, map(float, found.points), strict=True))


def _check_prompt(prompt: str) -> None:
    if not prompt.strip():
        raise DataError("the prompt is empty", expected="a text")
