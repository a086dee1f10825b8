"""Models of every kind of layer reject bad input with an error that names it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.tiny import make_decoder

from whorl.errors import ConfigError
from whorl.models import LanguageModel, TransformerConfig, make_model

HEADS = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
SHAPES: dict[str, dict[str, Any]] = {
    "heads": HEADS,
    "window": {**HEADS, "window": 2},
    "latent": {"kind": "latent", "n_heads": 2, "kv_rank": 8, "nope_dim": 8, "rope_dim": 8, "v_dim": 8},
    **{kind: {"kind": kind, "options": {"n_heads": 2}} for kind in ("linear", "pointwise")},
    **{kind: {"kind": kind} for kind in ("mamba", "rnn", "gru", "lstm")},
}
GROWING = ("heads", "window", "latent", "pointwise", "decoder")  # kinds with a bounded state


def shape(mixer: dict[str, Any], **more: Any) -> TransformerConfig:
    base = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "mlp_hidden": 64, "mixers": {"m": mixer}}
    return TransformerConfig.model_validate({**base, **more})


def model(kind: str) -> LanguageModel:
    if kind == "decoder":
        return make_decoder(vocab_size=50, n_layers=1)
    return make_model(shape(SHAPES[kind]), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [*SHAPES, "decoder"])
def test_forward_rejects_bad_ids_and_states(kind: str) -> None:
    made, ids = model(kind), torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ConfigError, match="token id 50"):
        made(ids + 50)
    with pytest.raises(ConfigError, match="token id -1"):
        made(ids - 1)
    for empty in (ids[:, :0], ids[:0]):
        with pytest.raises(ConfigError, match="ids have the shape"):
            made(empty)
    with pytest.raises(ConfigError, match="the same number of rows"):
        made(ids, state=made.new_state(2, 8))
    state = made.new_state(1, 4)
    if kind in GROWING:
        with pytest.raises(ConfigError, match="capacity is 4"):
            made(ids, state=state)
        assert state.length == 0  # unchanged
    made(ids[:, :4], state=state)
    assert state.length == 4 and state.n_bytes > 0


@pytest.mark.parametrize("kind", [*SHAPES, "decoder"])
def test_forward_rejects_bad_segments(kind: str) -> None:
    made, ids = model(kind), torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ConfigError, match="segments have the shape"):
        made(ids, segments=torch.zeros(1, 4, dtype=torch.int64))
    if kind == "decoder":
        with pytest.raises(ConfigError, match="together with a state"):
            made(ids, segments=ids, state=made.new_state(1, 8))


@pytest.mark.parametrize("kind", [*SHAPES])
def test_forward_handles_documents_of_one_token(kind: str) -> None:
    made = model(kind)
    ids = torch.arange(6)[None] % 50
    positions = torch.tensor([[0, 0, 1, 0, 0, 1]])
    packed = made(ids, positions=positions, segments=torch.tensor([[1, 2, 2, 3, 4, 4]]))
    packed.sum().backward()
    assert packed.isfinite().all() and all(
        p.grad.isfinite().all() for p in made.parameters() if p.grad is not None
    )
    torch.testing.assert_close(packed[:, :1], made(ids[:, :1]))
    torch.testing.assert_close(packed[:, 3:4], made(ids[:, 3:4]))


def test_make_model_rejects_bad_mixer_options() -> None:
    with pytest.raises(ConfigError, match="options of 'mamba'"):
        make_model(shape({"kind": "mamba", "options": {"heads": 2}}))
    with pytest.raises(ConfigError, match="even number"):
        make_model(shape({**SHAPES["latent"], "rope_dim": 7}))


def test_learned_positions_reject_positions_beyond_table() -> None:
    made = make_model(shape({**HEADS, "rope": None}, learned_positions=True, max_length=8))
    ids = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ConfigError, match="max_length = 8"):
        made(ids)
    for wrong in (8, -1):
        with pytest.raises(ConfigError, match=f"position {wrong}"):
            made(ids[:, :2], positions=torch.tensor([7, wrong]))
    state = made.new_state(1, 12)
    made(ids[:, :8], state=state)
    with pytest.raises(ConfigError, match="a row of 9 positions"):
        made(ids[:, :1], state=state)
