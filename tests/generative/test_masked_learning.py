"""Masked diffusion learns a text of known entropy, samples its law, and fills gaps from both sides."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tests.support.tiny import decoder_config
from tests.support.train.pretraining import train
from tests.support.train.tiny import Notes, job, make_tokens

from whorl.engine import Engine, EngineConfig, SamplingParams
from whorl.engine.request import Request
from whorl.models.transformer_config import masked_decoder
from whorl.tokens.tokenizer import Tokenizer

MASK = 300
LETTERS = "abcdefgh"


@pytest.mark.parametrize("block", [None, 4])
def test_bound_approaches_entropy_and_samples_have_the_law_of_the_text(
    tmp_path: Path, block: int | None
) -> None:
    rng, notes = np.random.default_rng(0), Notes()
    walks = {n: "".join(LETTERS[i % 8] for i in rng.integers(0, 2, 300).cumsum()) for n in range(120)}
    tokens = make_tokens(tmp_path / "tokens", documents=120, replaced=walks)
    model = masked_decoder(decoder_config(vocab_size=300), MASK, block, 16)
    wanted = job(
        tokens, model=model, objective="masked", seq_len=16, batch_size=32, steps=600, evaluations=1
    )  # fmt: skip
    network = train(wanted, tmp_path, notes).eval()
    # After a letter comes the same one or the next one of a circle. A perfect model has no gap in its bound.
    entropy, last = math.log(2), notes.evaluations[-1]["held_out_nll"]
    assert entropy - 0.02 < last < entropy + 0.15, last
    tokenizer = Tokenizer.load(tokens)
    engine = Engine(
        network, EngineConfig.for_batch(32, 16), token_bytes=tokenizer.text_bytes(MASK + 1),
        banned_ids=tokenizer.banned_ids(MASK + 1),
    )  # fmt: skip
    params = SamplingParams(temperature=1, top_p=1, seed=1)
    ids = tokenizer.encode_prompt("aabccd")
    texts = ["d" + g.text.decode() for g in engine.generate([ids] * 32, params, max_tokens=9)]
    steps = [(LETTERS.find(b) - LETTERS.find(a)) % 8 for text in texts for a, b in pairwise(text)]
    assert sum(step < 2 for step in steps) / len(steps) > 0.9
    assert abs(steps.count(1) / len(steps) - 0.5) < 0.12
    if block is None:  # the letter of a gap follows from both sides, which no model of the next token sees
        greedy = SamplingParams(temperature=0)
        gaps = [
            Request(
                id=LETTERS[n], ids=tokenizer.encode_prompt("ab" + LETTERS[n - 1]), max_tokens=1, sampling=greedy,
                suffix=tokenizer.encode_to_list(LETTERS[(n + 1) % 8]),
            )
            for n in range(8)
        ]  # fmt: skip
        assert all(delta.text.decode() == delta.request_id for delta in engine.stream(gaps))
