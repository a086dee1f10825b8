"""Scores equal to the bit for any batch, order and cache; without the mode the same choices."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tests.support.evals.hf_folders import make_folder, sentences

from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import Request, Response, Score, ScoreRequest, TextRequest

N_CHOICES = 4
Scores = dict[int, tuple[float, ...]]


def make_requests() -> list[Request]:
    """Four choices for each of 12 questions behind shared examples, of lengths that differ, and two texts in windows."""
    texts, rng = sentences(80, seed=3), random.Random(0)
    shared = " ".join(texts[:4])
    choices: list[Request] = [
        ScoreRequest(f"{shared} {texts[4 + n // N_CHOICES]}", " " + rng.choice(texts)[: rng.randint(2, 40)])
        for n in range(12 * N_CHOICES)
    ]
    return [*choices, TextRequest(" ".join(texts[:20])), ScoreRequest("", texts[0]), TextRequest(texts[1])]


def scores(backend: EngineBackend, requests: list[Request], order: list[int]) -> Scores:
    """Return the log-probabilities of the requests in `order`, by their number."""
    found: dict[int, Response] = {}
    backend.respond([requests[n] for n in order], lambda n, response: found.__setitem__(order[n], response))
    assert len(found) == len(order) and all(isinstance(response, Score) for response in found.values())
    return {n: response.log_probs for n, response in found.items() if isinstance(response, Score)}


def chosen(found: Scores) -> list[int]:
    totals = [sum(log_probs) for log_probs in (found[n] for n in range(12 * N_CHOICES))]
    groups = [totals[n : n + N_CHOICES] for n in range(0, len(totals), N_CHOICES)]
    return [max(range(N_CHOICES), key=group.__getitem__) for group in groups]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_are_equal_to_the_bit_in_any_batch(tmp_path: Path, dtype: str) -> None:
    folder, requests = make_folder(tmp_path, "gpt2"), make_requests()
    settings = {"dtype": dtype, "max_num_batched_tokens": 96}
    alone = EngineBackend.open(folder, batch_size=1, batch_invariant=True, **settings)
    expected = scores(alone, requests, list(range(len(requests))))
    for batch_size in (1, 8, 64):
        strict = EngineBackend.open(folder, batch_size=batch_size, batch_invariant=True, **settings)
        free = EngineBackend.open(folder, batch_size=batch_size, **settings)
        for seed in range(3):  # the first turn with an empty cache
            order = random.Random(seed + batch_size).sample(range(len(requests)), len(requests))
            assert scores(strict, requests, order) == expected
            some = order[: len(order) // 3]
            assert scores(strict, requests, some) == {n: expected[n] for n in some}
            if dtype == "float32":
                assert chosen(scores(free, requests, order)) == chosen(expected)
