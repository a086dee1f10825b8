"""`Engine.generate`, `Engine.stream` and loading for sampling."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.engine.support.no_cache import generate_without_cache
from tests.support.engine.parity import assert_same, decoder

from whorl.engine import EngineConfig, SamplingParams, Token, fastest_dtype, load_for_sampling
from whorl.engine.engine import Engine
from whorl.engine.request import Generation, Request
from whorl.errors import ConfigError
from whorl.machine import kernel_choice
from whorl.machine.device_probe import probe
from whorl.models import Transformer, save_model


def model(**changes: object) -> Transformer:
    small = {"vocab_size": 40, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "mlp_hidden": 64}
    return decoder(**{**small, **changes})


def test_load_for_sampling(tmp_path: Path) -> None:
    save_model(model(), tmp_path)
    loaded = load_for_sampling(tmp_path, dataclasses.replace(probe(), device="cpu", dtype="float32"))
    assert loaded.dtype == torch.float32 and not loaded.training
    assert loaded.config == model().config


@pytest.mark.parametrize("slow", [torch.float32, torch.bfloat16])
def test_fastest_dtype_avoids_slower_one(
    slow: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if weight.dtype == slow:
            time.sleep(0.01)
        return real(x, weight)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(kernel_choice, "choices_file", lambda: tmp_path / "kernels.json")
    monkeypatch.setattr(kernel_choice, "_chosen", {})
    machine = dataclasses.replace(probe(), device="cpu", dtype="bfloat16")
    assert fastest_dtype(model().config, machine) != slow


WORDS = [bytes([97 + i]) for i in range(26)] + [b"ab", b"abc", b"bc", b"\n", b"\n  "] + [b""] * 9


def engine(**options: Any) -> Engine:
    config = EngineConfig.for_batch(4, 64)
    return Engine(model(), config, banned_ids=(39,), **{"token_bytes": WORDS, **options})


def write(sampling: dict[str, Any], **options: Any) -> Generation:
    """The completion of 1, 2, 3."""
    settings = SamplingParams(**{"temperature": 1, **sampling})
    (found,) = engine().generate([[1, 2, 3]], settings, **{"max_tokens": 30, **options})
    return found


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_matches_generation_without_cache(temperature: float) -> None:
    def plain(seed: int) -> list[Token]:
        settings = SamplingParams(temperature=temperature, seed=seed)
        return list(generate_without_cache(model(), [1, 2, 3], settings, max_tokens=30, banned_ids=(39,)))

    first, other = (write({"temperature": temperature, "seed": seed}) for seed in (0, 1))
    assert_same(first.tokens, plain(0))
    assert (first.ids == other.ids) == (temperature == 0)
    assert first.finish_reason == "length" and 39 not in first.ids


def test_generate_starts_with_forced_prefix() -> None:
    for seed in range(5):
        found = write({"seed": seed}, max_tokens=6, forced_prefixes=[b"abcx"])
        output = b"".join(WORDS[i] for i in found.ids)
        assert output == b"abcx" + found.text
        n_forced = next(n for n in range(5) if len(b"".join(WORDS[i] for i in found.ids[: n + 1])) > 4)
        assert len(found.ids) == 6 + n_forced, "max_tokens does not count the forced prefix"


def test_generate_uses_own_seed_and_raw_log_probs() -> None:
    sampling = {"seed": 5, "repetition_penalty": 1.5, "logit_bias": {3: 2.0}}
    found, again = (write(sampling, max_tokens=8, top_log_probs=4).tokens for _ in range(2))
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
def test_batch_matches_each_prompt_alone(sampling: dict[str, Any]) -> None:
    """Seed n + 11 for prompt n, ends at stop ids, and equal prompts."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8], [9], [4, 5]]
    options: dict[str, Any] = {"max_tokens": 12, "stop_ids": range(5, 9)}
    batch = engine().generate(prompts, SamplingParams(seed=11, **sampling), **options)
    each = [SamplingParams(seed=11 + n, **sampling) for n in range(len(prompts))]
    assert [c.ids for c in batch] == [c.ids for c in engine().generate(prompts, each, **options)]
    for prompt, own, found in zip(prompts, each, batch, strict=True):
        (alone,) = engine().generate([prompt], own, **options)
        assert_same(found.tokens, alone.tokens)
        stopped = alone.ids[-1] in range(5, 9)
        assert found.finish_reason == alone.finish_reason == ("stop" if stopped else "length")


def test_stream_aborts_what_is_not_read_and_names_a_long_prompt() -> None:
    running = engine()
    requests = [Request(id=str(n), ids=(1, n), max_tokens=20) for n in range(3)]
    deltas = running.stream(requests)
    assert next(deltas).tokens
    deltas.close()  # type: ignore[attr-defined]
    assert not running.busy
    running.check_integrity()
    assert running.stats.finished == {"abort": 3}
    again = list(running.stream(requests))  # the same ids: deltas of the aborted ones are gone
    assert sum(len(delta.tokens) for delta in again) == 60
    with pytest.raises(ConfigError, match="prompt 1 has 64 ids"):
        running.generate([[1], [1] * 64])


def test_stream_refuses_an_engine_with_other_requests() -> None:
    running = engine()
    running.add(Request(id="a", ids=(1, 2), max_tokens=4))
    with pytest.raises(ConfigError, match="runs other requests"):
        running.generate([[1]])
    while running.busy:
        running.step()
    assert running.generate([[1]], max_tokens=2)[0].finish_reason == "length"
