"""`whorl_decoder`: the same logits with a cache, in packed rows and after saving."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.models.initialization import add_noise, generator
from torch.utils.flop_counter import FlopCounterMode

from whorl.errors import CheckpointError, ConfigError
from whorl.models import Transformer, TransformerConfig, load_model, save_model, whorl_decoder
from whorl.nn.rotary import rotary_frequencies
from whorl.objectives.next_token import next_token_reference


def small(**change: object) -> TransformerConfig:
    base = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8,
            "mlp_hidden": 64, "ngram_buckets": 128}  # fmt: skip
    return whorl_decoder(**{**base, **change})


def noisy(config: TransformerConfig, seed: int = 0) -> Transformer:
    """Return a decoder with noise on every parameter."""
    rng = generator(seed)
    return add_noise(Transformer(config, rng), 0.1, rng)


IDS = torch.randint(0, 97, (2, 150), generator=generator(3))


lengths = st.lists(st.integers(1, 149), max_size=6, unique=True)


@settings(max_examples=12)
@given(lengths, st.sampled_from(["relu2", "swiglu"]), st.booleans(), st.sampled_from([None, 40, 150]))
def test_decoder_decodes_in_pieces_like_one_forward(
    cuts: list[int], mlp: str, tied: bool, trained: int | None
) -> None:
    model = noisy(small(mlp=mlp, tie_embeddings=tied, trained_length=trained))
    with torch.no_grad():
        whole = model.logits(model(IDS))
        state = model.new_state(2, 150)
        edges = [0, *sorted(cuts), 150]
        parts = [model.logits(model(IDS[:, a:b], state=state)) for a, b in itertools.pairwise(edges)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)


def test_yarn_applies_only_beyond_trained_length() -> None:
    plain, extended = noisy(small()), noisy(small(trained_length=100))
    assert torch.equal(plain(IDS[:, :100]), extended(IDS[:, :100]))
    assert not torch.allclose(plain(IDS), extended(IDS), atol=1e-3)
    assert extended.rotary is not None
    far, near = extended.rotary.for_capacity(101), extended.rotary.for_capacity(100)
    scaling = far.scaling
    assert near.scaling is None and scaling is not None
    fast, slow = (rotary_frequencies(8, scaling=s)[[0, -1]] for s in (None, scaling))
    assert fast[0] == slow[0] and slow[1] == fast[1] / scaling.factor
    assert scaling.attention_scaling > 1, "sharper scores"
    assert plain.eval_window == 512 and extended.eval_window == 400


def test_decoder_flops_and_params_match_torch() -> None:
    model, length = noisy(small(n_kv_heads=4)), 256
    ids = torch.randint(0, 97, (2, length))
    with FlopCounterMode(display=False) as counter:
        hidden, targets = model(ids).flatten(0, 1), ids.flatten()
        next_token_reference(hidden, model.head_weight, targets, torch.ones_like(targets)).total.backward()
    # A block of 256 queries computes all pairs of 256 positions where a causal mask needs half of them.
    attention = 6.0 * 2 * 4 * 8 * length  # layers, heads, head_dim
    expected = (model.flops_per_token(length) + attention) * ids.numel()
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.02)
    params = model.params()
    assert params["total"] == sum(p.numel() for p in model.parameters())
    assert params["ngram"] == 2 * 128 * 32 and params["embedding"] == 2 * 97 * 32
    assert params["active"] == params["total"] - params["ngram"] + 2 * 32
    assert model.kv_bytes_per_token() == 2 * 2 * 4 * 8 * 4


def test_decoder_is_seeded_and_survives_saving(tmp_path: Path) -> None:
    one, two = (Transformer(small(), generator(5)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    model = noisy(small())
    save_model(model, tmp_path)
    assert torch.equal(load_model(tmp_path)(IDS), model(IDS))


def test_load_model_names_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read a model"):
        load_model(tmp_path)
    save_model(noisy(small()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config["transformer"]))
    with pytest.raises(
        ConfigError, match=r"(?s)config\.json: field 'model_type' is missing.*write the model"
    ):
        load_model(tmp_path)
    config["transformer"]["mlp_hidden"] = 32
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\."):
        load_model(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_model(tmp_path)
