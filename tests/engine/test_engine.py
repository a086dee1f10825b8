"""Sampling from the right distribution; generation that does not depend on the cache."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from whorl.engine import Sampling, complete, distribution, fastest_dtype, generate, load_for_sampling
from whorl.engine.sampler import sample
from whorl.engine.step import DecodeStep
from whorl.models import Decoder, DecoderConfig, save_model
from whorl.nn.mlp import Activation
from whorl.runs import probe

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -3.0]])


def model(**changes: object) -> Decoder:
    config = DecoderConfig(
        vocab_size=40,
        d_model=32,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        head_dim=16,
        mlp_hidden=64,
        ngram_buckets=64,
    ).model_copy(update=changes)
    g = torch.Generator().manual_seed(0)
    made = Decoder(config, g)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape, generator=g) * 0.2)
    return made


def test_cuts_keep_the_likeliest_and_renormalise() -> None:
    raw = LOGITS.softmax(-1)
    assert torch.allclose(distribution(LOGITS, Sampling(temperature=1, top_p=1)), raw)
    top = distribution(LOGITS, Sampling(temperature=1, top_p=1, top_k=2))
    assert (top > 0).sum() == 2 and torch.allclose(top.sum(), torch.tensor(1.0))
    assert (distribution(LOGITS, Sampling(temperature=1, top_p=0.01)) > 0).sum() == 1
    assert (distribution(LOGITS, Sampling(temperature=1, top_p=0.7)) > 0).sum() == 2  # 0.64, then over
    assert distribution(LOGITS, Sampling(temperature=0)).tolist() == [[1, 0, 0, 0, 0]]
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_p": 2}, {"top_k": -1}):
        with pytest.raises(ValidationError):
            Sampling(**wrong)


def test_draws_follow_the_distribution_and_both_log_probabilities_are_told() -> None:
    sampling, n = Sampling(temperature=0.7, top_p=0.95), 20_000
    want = distribution(LOGITS, sampling)[0]
    token, sampled, raw = sample(LOGITS.expand(n, -1), sampling, torch.Generator().manual_seed(1))
    counts = torch.bincount(token, minlength=5).float()
    kept = want > 0
    assert counts[~kept].sum() == 0
    chi_square = ((counts - n * want)[kept] ** 2 / (n * want[kept])).sum()
    assert chi_square < 20
    assert torch.allclose(sampled, want.log()[token], atol=1e-5)
    assert torch.allclose(raw, LOGITS.log_softmax(-1).expand(n, -1))


def test_without_cuts_draws_come_in_the_order_of_the_ids_too() -> None:
    sampling, n = Sampling(temperature=1.3, top_p=1), 20_000
    want = distribution(LOGITS, sampling)[0]
    token, sampled, _ = sample(LOGITS.expand(n, -1), sampling, torch.Generator().manual_seed(1))
    counts = torch.bincount(token, minlength=5).float()
    assert ((counts - n * want) ** 2 / (n * want)).sum() < 25
    assert torch.allclose(sampled, want.log()[token], atol=1e-5)


def test_a_model_is_loaded_for_sampling(tmp_path: Path) -> None:
    save_model(model(), tmp_path)
    loaded = load_for_sampling(tmp_path, dataclasses.replace(probe(), device="cpu", dtype="float32"))
    assert loaded.dtype == torch.float32 and not loaded.training
    assert loaded.config == model().config


@pytest.mark.parametrize("slow", [torch.float32, torch.bfloat16])
def test_the_slower_type_is_not_chosen(slow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == slow:
            time.sleep(0.01)
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    machine = dataclasses.replace(probe(), device="cpu", dtype="bfloat16")
    assert fastest_dtype(model().config, machine) != slow


@pytest.mark.parametrize(
    "changes",
    [
        {},
        *({"mlp": kind} for kind in get_args(Activation)),
        {"smear_keys": False},
        {"tie_embeddings": True, "ngram_orders": ()},
        {"n_kv_heads": 2},
        {"trained_length": 10},
    ],
)
def test_a_decoding_step_is_the_decoders_own_forward(changes: dict[str, object]) -> None:
    decoder = model(**changes)
    step, ids = DecodeStep(decoder), torch.randint(40, (3, 20), generator=torch.Generator().manual_seed(1))
    ours, theirs = decoder.new_state(3, 20), decoder.new_state(3, 20)
    with torch.inference_mode():
        for begin, end in ((0, 1), (1, 6), (6, 7), *((t, t + 1) for t in range(7, 20))):
            want = decoder.logits(decoder(ids[:, begin:end], state=theirs)[:, -1])
            if (
                end - begin > 1
            ):  # several at once, as in a prompt, go through the decoder and leave the same cache
                decoder(ids[:, begin:end], state=ours)
            else:
                assert torch.allclose(step(ids[:, begin:end], ours), want, atol=1e-4, rtol=1e-4)
        for a, b in zip(ours.layers, theirs.layers, strict=True):
            assert a.length == b.length == 20
            assert torch.allclose(a.k, b.k, atol=1e-4) and torch.allclose(a.v, b.v, atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_and_without_cache_the_same_seed_writes_the_same(temperature: float) -> None:
    decoder = model()

    def write(seed: int, use_cache: bool) -> list[int]:
        stream = generate(
            decoder, [1, 2, 3], Sampling(temperature=temperature), torch.Generator().manual_seed(seed),
            max_tokens=30, forbidden=(39,), use_cache=use_cache,
        )  # fmt: skip
        return [t.id for t in stream]

    assert write(0, True) == write(0, True) == write(0, False)
    assert (write(0, True) == write(1, True)) == (temperature == 0)
    assert 39 not in write(2, True)


def test_many_are_completed_as_each_alone() -> None:
    decoder = model()
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8], [9]]
    together = complete(
        decoder, prompts, Sampling(temperature=0), torch.Generator(), max_tokens=12, eos_id=39
    )
    for prompt, found in zip(prompts, together, strict=True):
        alone = []
        for token in generate(decoder, prompt, Sampling(temperature=0), torch.Generator(), max_tokens=12):
            if token.id == 39:
                break
            alone.append(token.id)
        assert found == alone


def test_required_bytes_are_written_first_in_any_tokens() -> None:
    decoder = model()
    names = [bytes([97 + i]) for i in range(26)] + [b"ab", b"abc", b"bc", b"\n", b"\n  "]
    for seed in range(5):
        stream = generate(
            decoder, [1], Sampling(temperature=1.0), torch.Generator().manual_seed(seed),
            max_tokens=6, forbidden=range(len(names), 40), required=b"abcx", token_bytes=names,
        )  # fmt: skip
        text = b"".join(names[t.id] for t in stream)
        assert text.startswith(b"abcx")
