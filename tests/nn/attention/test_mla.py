"""Multi-head latent attention: both forms against the equations and against DeepSeek-V3 of `transformers`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.nn.checks import gen, randn
from torch.testing import assert_close

from whorl.nn.attention.mla import MultiHeadLatentAttention
from whorl.nn.rotary import Rotary


def make_layer(rotary: Rotary | str | None = "own", **kwargs: Any) -> MultiHeadLatentAttention:
    options = {"kv_rank": 20, "q_rank": 14, "nope_dim": 8, "rope_dim": 4, "v_dim": 6, **kwargs}
    turned = Rotary(options["rope_dim"], 100.0, torch.float32) if rotary == "own" else rotary
    made = MultiHeadLatentAttention(24, 3, rotary=turned, generator=gen(), **options)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.out.weight, std=0.3, generator=gen(1))
    for norm in (made.q_a_norm, made.kv_a_norm):
        if norm is not None:
            torch.nn.init.uniform_(norm.weight, 0.5, 1.5, generator=gen(2))
    return made


def mla_by_definition(made: MultiHeadLatentAttention, x: torch.Tensor) -> torch.Tensor:
    """Return one row [T, D] by the paper's equations."""

    def norm(h: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain

    def rotate(h: torch.Tensor) -> torch.Tensor:
        """Rotate pairs (i, i + 2) of h [T, heads, 4] as complex numbers."""
        angle = torch.arange(len(h))[:, None, None] * 100.0 ** (-torch.arange(2) / 2)
        z = torch.complex(h[..., :2], h[..., 2:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([z.real, z.imag], -1)

    q = (norm(x @ made.q_a.weight.t(), made.q_a_norm.weight) @ made.q_b.weight.t()).view(-1, 3, 12)
    c, r = (x @ made.kv_a.weight.t()).split([20, 4], -1)
    kv = (norm(c, made.kv_a_norm.weight) @ made.kv_b.weight.t()).view(-1, 3, 14)
    query = torch.cat([q[..., :8], rotate(q[..., 8:])], -1)
    key = torch.cat([kv[..., :8], rotate(r[:, None]).expand(-1, 3, -1)], -1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / 12**0.5
    later = torch.ones(scores.shape[1:]).triu(1).bool()
    p = scores.masked_fill(later, -torch.inf).softmax(-1)
    return torch.einsum("hij,jhd->ihd", p, kv[..., 8:]).flatten(1) @ made.out.weight.t()


@pytest.mark.parametrize("form", ["expanded", "absorbed"])
def test_mla_forms_match_equations(form: str) -> None:
    made = make_layer()
    made.form = form  # type: ignore[assignment]
    x = randn(2, 9, 24, seed=3)
    want = torch.stack([mla_by_definition(made, row) for row in x])
    assert_close(made(x), want, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q_rank", [None, 14])
def test_mla_matches_transformers_with_gradients(interleaved: bool, q_rank: int | None) -> None:
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as peer

    config = DeepseekV3Config(
        hidden_size=24, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=q_rank, kv_lora_rank=20,
        qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=6, rope_interleave=interleaved,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0}, attn_implementation="eager",
    )  # fmt: skip
    theirs = peer.DeepseekV3Attention(config, 0)
    layout = "interleaved" if interleaved else "half"
    made = make_layer(Rotary(4, 100.0, torch.float32, layout=layout), q_rank=q_rank)  # type: ignore[arg-type]
    names = {
        "q": "q_proj", "q_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "q_b": "q_b_proj",
        "kv_a": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "kv_b": "kv_b_proj", "out": "o_proj",
    }  # fmt: skip
    renamed = {f"{names[n.split('.')[0]]}.weight": p for n, p in made.state_dict().items()}
    theirs.load_state_dict(renamed)  # strict: all names are mapped

    x = randn(2, 9, 24, seed=3, grad=True)
    tables = peer.DeepseekV3RotaryEmbedding(config)(x, torch.arange(9)[None])
    hidden = torch.full((9, 9), float("-inf")).triu(1)[None, None]
    want = theirs(x, tables, hidden)[0]
    for form in ("expanded", "absorbed"):
        made.form = form  # type: ignore[assignment]
        assert_close(made(x), want, atol=1e-5, rtol=1e-4)

    upstream = randn(*want.shape, seed=4)
    ours = torch.autograd.grad(made(x), [x, *made.parameters()], upstream)
    of_peer = dict(theirs.named_parameters())
    order = [of_peer[f"{names[n.split('.')[0]]}.weight"] for n, _ in made.named_parameters()]
    assert_close(ours, torch.autograd.grad(want, [x, *order], upstream), atol=1e-4, rtol=1e-3)


def test_mla_auto_selects_the_cheaper_form() -> None:
    made = MultiHeadLatentAttention(24, 2, kv_rank=512, nope_dim=128, rope_dim=64, v_dim=128, rotary=None)
    assert not made._expanded_is_cheaper(1, 4096)
    # Over the past only, the costs are equal at kv_rank (nope + v) / (2 kv_rank - nope - v) = 171 queries.
    assert not made._expanded_is_cheaper(160, 1_000_000) and made._expanded_is_cheaper(180, 1_000_000)
    assert made._expanded_is_cheaper(4096, 0)
