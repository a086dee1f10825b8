"""A masked diffusion model in the API: blocks in a stream, infilling, and refusals that name the field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch
from tests.support.serve.live_server import Running, make_state, make_tokenizer, running
from tests.support.train.model_shapes import HEADS, disturbed, shape

from whorl.engine.config import EngineConfig
from whorl.errors import ConfigError
from whorl.evals.model.sampling import open_engine
from whorl.models import make_model
from whorl.tokens.token_encoder import TokenEncoder

TOKENS = {"prompt": "def f", "model": "tiny", "max_tokens": 10, "seed": 1}


def serve(block: int | None, mask_id: int | None = None) -> Any:
    tokenizer = make_tokenizer()
    mask = tokenizer.vocab_size if mask_id is None else mask_id
    made = shape(
        HEADS, vocab_size=tokenizer.vocab_size + 1, max_length=96, masked={"mask_id": mask, "block": block}
    )
    model = disturbed(make_model(made, torch.Generator().manual_seed(0)), 0.2).eval()
    return open_engine(model, EngineConfig(max_model_len=96, max_num_seqs=4), TokenEncoder(tokenizer))


@pytest.fixture(scope="module")
def blocks() -> Iterator[Running]:
    with running(make_state(serve(4))) as server:
        yield server


def test_stream_has_whole_blocks_and_equals_the_answer(blocks: Running) -> None:
    complete = blocks.client().completions.create
    whole = complete(**TOKENS, logprobs=1, extra_body={"steps": 2, "reveal": "entropy", "ignore_eos": True})
    (choice,) = whole.choices
    assert whole.usage.completion_tokens == 10 and len(choice.logprobs.token_logprobs) == 10
    stream = complete(
        **TOKENS, logprobs=1, stream=True, extra_body={"steps": 2, "reveal": "entropy", "ignore_eos": True}
    )
    parts = [len(part.choices[0].logprobs.tokens) for part in stream if part.choices[0].logprobs]
    assert sum(parts) == 10 and len([n for n in parts if n]) <= 4
    assert blocks.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], max_tokens=4
    )


@pytest.mark.parametrize(
    ("field", "value", "also"),
    [
        ("presence_penalty", 1, {}), ("frequency_penalty", 1, {}), ("grammar", "start: /a/", {}), ("suffix", "x", {}),
        ("prompt_log_probs", None, {"echo": True, "logprobs": 1}), ("repetition_penalty", 1.5, {}),
    ],
)  # fmt: skip
def test_refused_field_is_a_400_that_names_it(
    blocks: Running, field: str, value: Any, also: dict[str, Any]
) -> None:
    extra = {**also, **({} if value is None else {field: value})}
    with pytest.raises(openai.BadRequestError) as caught:
        blocks.client().completions.create(**TOKENS, extra_body=extra)
    assert caught.value.param == field and field in caught.value.message


def test_suffix_fills_a_gap_of_max_tokens() -> None:
    with running(make_state(serve(None))) as server:
        found = server.client().completions.create(
            **TOKENS, suffix="return a", extra_body={"ignore_eos": True}
        )
        assert found.usage.completion_tokens == 10 and found.choices[0].finish_reason == "length"


def test_mask_that_is_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"masked.mask_id is 7, a token"):
        serve(4, mask_id=7)
