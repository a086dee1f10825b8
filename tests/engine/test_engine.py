"""`generate`, `complete`, `DecodeStep` and loading for sampling."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.support.engine.parity import decoder

from whorl.engine import SamplingParams, Token, complete, fastest_dtype, generate, load_for_sampling
from whorl.engine.step import DecodeStep
from whorl.machine.device_probe import probe
from whorl.models import Decoder, save_model
from whorl.nn.mlp import Activation


def model(**changes: object) -> Decoder:
    small = {"vocab_size": 40, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "mlp_hidden": 64}
    return decoder(**{**small, **changes})


def test_load_for_sampling(tmp_path: Path) -> None:
    save_model(model(), tmp_path)
    loaded = load_for_sampling(tmp_path, dataclasses.replace(probe(), device="cpu", dtype="float32"))
    assert loaded.dtype == torch.float32 and not loaded.training
    assert loaded.config == model().config


@pytest.mark.parametrize("slow", [torch.float32, torch.bfloat16])
def test_fastest_dtype_avoids_slower_one(slow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == slow:
            time.sleep(0.01)
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    machine = dataclasses.replace(probe(), device="cpu", dtype="bfloat16")
    assert fastest_dtype(model().config, machine) != slow


SHAPES = [{}, {"smear_keys": False}, {"tie_embeddings": True, "ngram_orders": ()}, {"n_kv_heads": 2}]
SHAPES += [{"trained_length": 10}, *({"mlp": kind} for kind in get_args(Activation))]


@pytest.mark.parametrize("changes", SHAPES)
def test_decode_step_matches_decoder_forward(changes: dict[str, object]) -> None:
    network = model(**changes)
    step, ids = DecodeStep(network), torch.randint(40, (3, 20), generator=torch.Generator().manual_seed(1))
    ours, theirs = network.new_state(3, 20), network.new_state(3, 20)
    with torch.inference_mode():
        for begin, end in itertools.pairwise([0, 1, *range(6, 21)]):
            want = network.logits(network(ids[:, begin:end], state=theirs)[:, -1])
            if end - begin > 1:  # several positions go through the decoder and leave the same cache
                network(ids[:, begin:end], state=ours)
            else:
                assert torch.allclose(step(ids[:, begin:end], ours), want, atol=1e-4, rtol=1e-4)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert a.length == b.length == 20
            assert torch.allclose(a.k, b.k, atol=1e-4) and torch.allclose(a.v, b.v, atol=1e-4)


def tokens(settings: SamplingParams, seed: int, max_tokens: int = 30, **options: Any) -> list[Token]:
    """The tokens that the model writes after 1, 2, 3."""
    generator, options = torch.Generator().manual_seed(seed), {"banned_ids": (39,), **options}
    return list(generate(model(), [1, 2, 3], settings, generator, max_tokens=max_tokens, **options))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_with_cache_matches_without(temperature: float) -> None:
    def write(seed: int, use_cache: bool) -> list[int]:
        return [t.id for t in tokens(SamplingParams(temperature=temperature), seed, use_cache=use_cache)]

    assert write(0, True) == write(0, True) == write(0, False)
    assert (write(0, True) == write(1, True)) == (temperature == 0)
    assert 39 not in write(2, True)


def test_generate_starts_with_forced_prefix() -> None:
    names = [bytes([97 + i]) for i in range(26)] + [b"ab", b"abc", b"bc", b"\n", b"\n  "]
    options = {"banned_ids": range(len(names), 40), "forced_prefix": b"abcx", "token_bytes": names}
    for seed in range(5):
        found = tokens(SamplingParams(temperature=1.0), seed, max_tokens=6, **options)
        assert b"".join(names[t.id] for t in found).startswith(b"abcx")


def test_generate_uses_own_seed_and_raw_log_probs() -> None:
    settings = SamplingParams(temperature=1.0, seed=5, repetition_penalty=1.5, logit_bias={3: 2.0})
    found, again = (tokens(settings, seed, max_tokens=8, top_log_probs=4) for seed in (0, 1))
    assert found == again
    network, ids = model(), [1, 2, 3, *(t.id for t in found)]
    with torch.inference_mode():
        raw = network.logits(network(torch.tensor([ids])))[0].log_softmax(-1)
    for place, token in enumerate(found, start=2):
        assert token.raw_log_prob == pytest.approx(float(raw[place, token.id]), abs=1e-4)
        best = [i for i in raw[place].argsort(descending=True).tolist() if i != 39][:4]
        assert [i for i, _ in token.alternatives] == best
        assert [p for _, p in token.alternatives] == pytest.approx(raw[place, best].tolist(), abs=1e-4)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "frequency_penalty": 1}])
def test_complete_matches_generate_with_a_seed_each(sampling: dict[str, Any]) -> None:
    settings = SamplingParams(seed=11, **sampling)
    network, prompts = model(), [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    together = complete(network, prompts, settings, torch.Generator(), max_tokens=12, eos_id=39)
    for number, (prompt, found) in enumerate(zip(prompts, together, strict=True)):
        own = settings.model_copy(update={"seed": 11 + number})
        alone = [t.id for t in generate(network, prompt, own, torch.Generator(), max_tokens=12)]
        assert found == (alone[: alone.index(39)] if 39 in alone else alone)
