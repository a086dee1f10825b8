"""The general decoder: its blocks by the letter, rows in pieces and packed, any member by name, and its costs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.nn import functional as F

from whorl.errors import ConfigError
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import (
    MIXERS,
    AttentionConfig,
    CustomMixer,
    MLAConfig,
    MoEConfig,
    Rope,
    TransformerConfig,
)
from whorl.models.transformer_cost import mean_causal_keys
from whorl.nn.positions.rotary import RopeScaling

HEADS = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8)
LOCAL = HEADS.model_copy(update={"window": 3, "rope": Rope(base=500.0)})
LATENT = MLAConfig(
    n_heads=4, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=4, v_dim=8, rope=Rope(layout="interleaved")
)
ROUTED = MoEConfig(n_experts=4, top_k=2, hidden=24, shared_hidden=16, shared_gate=True, dense_layers=(0,))
GROUPED = MoEConfig(
    n_experts=4, top_k=2, hidden=24, scoring="sigmoid", scale=2.5, bias_balance=True, groups=(2, 1)
)
OPTIONS: dict[str, dict[str, Any]] = {
    "linear": {"n_heads": 4},
    "pointwise": {"n_heads": 4},
    "mamba": {"d_state": 4},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt": {
        "norm": "layer", "mlp": "gelu_tanh", "mlp_bias": True, "learned_positions": True, "tie_embeddings": True,
        "mixers": {"full": HEADS.model_copy(update={"rope": None, "bias": True, "out_bias": True})},
    },
    "gemma": {
        "mixers": {"local": LOCAL.model_copy(update={"qk_norm": True}), "full": HEADS.model_copy(update={"qk_norm": True})},
        "pattern": ("local", "local", "full"), "sandwich": True, "norm_offset": 1.0, "embedding_scale": 5.6, "mlp": "geglu",
    },
    "capped": {"mixers": {"full": HEADS.model_copy(update={"softcap": 4.0, "sink": True})}, "logit_softcap": 3.0},
    "alibi": {"mixers": {"full": HEADS.model_copy(update={"rope": None, "alibi": True})}, "parallel": True},
    "sparse": {
        "mixers": {
            "far": HEADS.model_copy(update={"stride": 3, "smear": True}), "near": HEADS.model_copy(update={"block": 4}),
        },
    },
    "post": {"post_norm": True, "norm": "layer", "mlp": "gelu"},
    "shared keys": {
        "mixers": {"full": HEADS.model_copy(update={"smear": True, "qk_norm": True, "window": 6})}, "kv_sharing_factor": 2,
    },
    "experts": {"experts": ROUTED},
    "latent": {"mixers": {"latent": LATENT}, "experts": GROUPED, "parallel": True},
    "mixed": {"mixers": {"fast": CustomMixer(kind="linear", options={"n_heads": 4}), "full": HEADS}},
    **{kind: {"mixers": {kind: CustomMixer(kind=kind, options=OPTIONS.get(kind, {}))}} for kind in MIXERS},
}  # fmt: skip


def config(**changes: Any) -> TransformerConfig:
    shape = {"vocab_size": 50, "d_model": 32, "n_layers": 3, "mlp_hidden": 40, "max_length": 64}
    return TransformerConfig(**{"mixers": {"full": HEADS}, **shape, **changes})


def made(dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    """With every weight drawn: those that begin at zero would hide their part of the network."""
    model = Transformer(config(**changes), torch.Generator().manual_seed(0), dtype)
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        with torch.no_grad():
            p.add_(torch.randn(p.shape, generator=generator) * 0.15)
    return model


IDS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_row_in_pieces_is_the_row(kind: str) -> None:
    model = made(**KINDS[kind])
    whole = model.logits(model(IDS))
    assert whole.dtype == torch.float32 and whole.shape == (2, 13, 50)
    for sizes in ([1, 3, 9], [1] * 13):
        state = model.new_state(2, 13)
        pieces = [model(ids, state=state) for ids in IDS.split(sizes, dim=1)]
        assert state.length == 13 and state.n_bytes > 0
        torch.testing.assert_close(model.logits(torch.cat(pieces, 1)), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_packed_row_is_its_documents_and_the_future_is_not_seen(kind: str) -> None:
    model = made(**KINDS[kind])
    a, b = IDS[:1, :8], IDS[1:, :5]
    packed = model(
        torch.cat([a, b], 1),
        positions=torch.cat([torch.arange(8), torch.arange(5)]),
        segments=torch.tensor([[1] * 8 + [2] * 5]),
    )
    torch.testing.assert_close(packed, torch.cat([model(a), model(b)], 1), atol=2e-5, rtol=1e-4)
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_segments_may_be_named_late_and_then_left_out(kind: str) -> None:
    """Before the first name a row is in segment 0, and without a name it goes on in its last document."""
    model, ids = made(**KINDS[kind]), IDS[:, :9]
    segments = torch.tensor([[0] * 3 + [1] * 6, [0] * 9])
    state = model.new_state(2, 9)
    named = (None, segments[:, 2:5], None, None)
    pieces = ids.split((2, 3, 3, 1), dim=1)
    outs = [model(part, segments=cut, state=state) for part, cut in zip(pieces, named, strict=True)]
    torch.testing.assert_close(torch.cat(outs, 1), model(ids, segments=segments), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_parameter_receives_a_gradient(kind: str) -> None:
    model = made(**KINDS[kind])
    ids = torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(3))
    F.cross_entropy(model.logits(model(ids)).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # HSTU's layer can also be told the time of each position, which a decoder of text has not
    assert [n for n in silent if not n.endswith("time_bias")] == []


def test_shared_keys_are_the_lenders_and_only_its_own_are_kept() -> None:
    model, plain = made(kv_sharing_factor=3), made()
    assert model.kv_bytes_per_token() == plain.kv_bytes_per_token() / 3
    assert not any(n.startswith("blocks.1.mixer.k.") for n, _ in model.named_parameters())
    with pytest.raises(ValueError, match="kv_sharing_factor"):
        config(mixers={"full": HEADS, "slow": CustomMixer(kind="mamba")}, kv_sharing_factor=2)
    with pytest.raises(ValueError, match="another window"):
        config(mixers={"full": HEADS, "near": HEADS.model_copy(update={"window": 4})}, kv_sharing_factor=2)


@pytest.mark.parametrize("kind", ["linear", "pointwise", "mamba"])
def test_flops_of_members_are_what_torch_counts(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    model, ids = made(**KINDS[kind]), torch.randint(0, 50, (1, 64))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(ids))
    said = model.flops_per_token(64) * 64 / 3
    assert said == pytest.approx(counter.get_total_flops(), rel=0.01)
    sparse = made(**KINDS["sparse"])  # strides of 3, and blocks of 4: what such a mask lets through
    far = sum(min(i, 2) + 1 + i // 3 for i in range(64))
    near = sum(i % 4 + 1 for i in range(64))
    pairs = [far, near, far]
    extra = sparse.flops_per_token(64) - sparse.flops_per_token(0)
    assert extra == pytest.approx(6 * 4 * 2 * 8 * sum(pairs) / 64)


@pytest.mark.parametrize("order", ["pre", "sandwich", "parallel", "post"])
@torch.no_grad()
def test_a_block_is_what_the_papers_write(order: str) -> None:
    model = made(
        n_layers=1,
        sandwich=order == "sandwich",
        parallel=order == "parallel",
        post_norm=order == "post",
        norm_offset=1.0,
        embedding_scale=3.0,
    )
    block: Any = model.blocks[0]

    def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight)

    x = F.embedding(IDS, model.embedding) * 3.0
    if order == "parallel":
        h = rms(x, block.mixer_norm)
        x = x + block.mixer(h) + block.mlp(h)
    elif order == "post":
        x = rms(x + block.mixer(x), block.mixer_norm)
        torch.testing.assert_close(model(IDS), rms(x + block.mlp(x), block.mlp_norm), atol=1e-5, rtol=1e-5)
        return
    elif order == "pre":
        x = x + block.mixer(rms(x, block.mixer_norm))
        x = x + block.mlp(rms(x, block.mlp_norm))
    else:
        x = x + rms(block.mixer(rms(x, block.mixer_norm)), block.mixer_after)
        x = x + rms(block.mlp(rms(x, block.mlp_norm)), block.mlp_after)
    torch.testing.assert_close(model(IDS), rms(x, model.final_norm), atol=1e-5, rtol=1e-5)


def test_a_new_model_is_the_same_for_the_same_seed_and_nearly_uniform() -> None:
    a, b = (Transformer(config(experts=ROUTED), torch.Generator().manual_seed(4)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    loss = F.cross_entropy(a.logits(a(IDS)).flatten(0, 1), IDS.roll(-1, 1).flatten())
    assert abs(loss.item() - math.log(50)) < 0.1


def test_a_pattern_is_repeated_over_the_layers() -> None:
    shape = config(n_layers=7, mixers={"local": LOCAL, "full": HEADS}, pattern=("local", "local", "full"))
    assert shape.layer_names() == ["local", "local", "full"] * 2 + ["local"]
    blocks: Any = Transformer(shape).blocks
    assert [block.mixer.mask.window for block in blocks] == [3, 3, None, 3, 3, None, 3]
    assert blocks[0].mixer.rotary is blocks[1].mixer.rotary and blocks[2].mixer.rotary.base == 10_000.0
    assert TransformerConfig.model_validate_json(shape.model_dump_json()) == shape


def test_a_configuration_survives_json_with_every_kind_of_mixer() -> None:
    stretched = Rope(scaling=RopeScaling("yarn", 4.0, 1024))
    for mixer in (
        HEADS,
        LATENT,
        CustomMixer(kind="mamba", options={"d_state": 8}),
        HEADS.model_copy(update={"rope": stretched}),
    ):
        shape = config(mixers={"m": mixer}, experts=GROUPED)
        again = TransformerConfig.model_validate_json(shape.model_dump_json())
        assert again == shape and type(again.mixers["m"]) is type(mixer)


def test_the_scale_of_an_embedding_is_rounded_to_the_compute_type() -> None:
    model = made(torch.bfloat16, embedding_scale=math.sqrt(3072))
    assert torch.equal(model.embed(IDS), F.embedding(IDS, model.embedding).bfloat16() * 55.5)


def test_logits_are_capped() -> None:
    model = made(logit_softcap=3.0)
    hidden = model(IDS) * 100
    plain = F.linear(hidden, model.head_weight)
    assert plain.abs().max() > 30
    torch.testing.assert_close(model.logits(hidden), 3 * torch.tanh(plain / 3))


def test_records_come_from_the_layers_with_experts_alone() -> None:
    model, records = made(experts=ROUTED), []
    model(IDS, routings=records)
    assert [int(r.counts.sum()) for r in records] == [2 * 26, 2 * 26]


def test_learned_positions_end_with_their_table() -> None:
    model = made(**KINDS["gpt"], max_length=12)
    with pytest.raises(ConfigError, match="a row of 13 positions"):
        model(IDS)
    state = model.new_state(2, 13)
    model(IDS[:, :12], state=state)
    with pytest.raises(ConfigError, match="at most max_length = 12"):
        model(IDS[:, :1], state=state)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mixers": {"x": {"n_heads": 4, "n_kv_heads": 3, "head_dim": 8}}},
            r"n_heads \(4\) must be a multiple",
        ),
        ({"mixers": {"x": {"n_heads": 4, "n_kv_heads": 4, "head_dim": 7}}}, r"head_dim \(7\)"),
        ({"mixers": {"x": {"kind": "mambo"}}}, "did you mean 'mamba'"),
        ({"pattern": ("ful",)}, "pattern names 'ful'.*did you mean 'full'"),
        (
            {"mixers": {"full": HEADS, "local": LOCAL}, "pattern": ("full",)},
            "'local' does not occur in pattern",
        ),
        ({"parallel": True, "sandwich": True}, "exclude each other"),
        ({"norm": "layer", "norm_offset": 1.0}, "norm_offset"),
        ({"experts": ROUTED.model_copy(update={"dense_layers": (3,)})}, "dense_layers"),
        ({"experts": {"n_experts": 2, "top_k": 3, "hidden": 8}}, r"top_k \(3\)"),
        ({"mlp": "swigloo"}, "mlp"),
        ({"n_layer": 2}, "n_layer"),
    ],
)
def test_an_impossible_shape_names_its_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_options_that_a_member_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"options of 'gru' are \{'n_heads': 2\}.*n_heads"):
        made(mixers={"m": CustomMixer(kind="gru", options={"n_heads": 2})})


def test_parameters_are_counted() -> None:
    model = made(experts=ROUTED, learned_positions=True)
    counted = model.params()
    assert counted["total"] == sum(p.numel() for p in model.parameters())
    assert counted["embedding"] == 2 * 50 * 32 + 64 * 32
    # two layers of experts, each of which leaves 2 of 4 idle
    assert counted["total"] - counted["active"] == 2 * 2 * (3 * 24 * 32)
    assert made().params()["active"] == made().params()["total"]


def test_flops_are_those_of_the_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    for changes in ({}, {"tie_embeddings": True, "mlp": "gelu"}, {"mixers": {"latent": LATENT}}):
        model, ids = made(n_layers=2, **changes), torch.randint(0, 50, (1, 64))
        for block in model.blocks:
            block.mixer.backend = "reference"  # torch does not count its fused attention on a CPU
        with FlopCounterMode(display=False) as counter:
            model.logits(model(ids)).sum().backward()
        matrices = model.flops_per_token(0)
        # the reference forms all pairs of positions, also those that may not see each other
        said = 64 * (matrices + 2 * (model.flops_per_token(64) - matrices))
        assert said == pytest.approx(counter.get_total_flops(), rel=0.01), changes
    assert mean_causal_keys(100, None) == mean_causal_keys(100, 100) == 50.0
    exact = sum(min(i + 1, 7) for i in range(1000)) / 1000
    assert mean_causal_keys(1000, 7) == pytest.approx(exact, rel=0.1)
    experts = made(experts=ROUTED)
    assert experts.flops_per_token(0) < 6 * experts.params()["active"]


def test_bytes_of_the_state() -> None:
    assert made().kv_bytes_per_token() == 3 * 2 * 2 * 8 * 4
    assert made(torch.bfloat16).kv_bytes_per_token() == 3 * 2 * 2 * 8 * 2
    assert made(mixers={"latent": LATENT}).kv_bytes_per_token() == 3 * (16 + 4) * 4
    assert made(mixers={"local": LOCAL, "full": HEADS}).kv_bytes_per_token() == 1 * 2 * 2 * 8 * 4
    assert made(**KINDS["mamba"]).kv_bytes_per_token() == 0
    model = made()
    assert model.new_state(3, 10).n_bytes == 3 * 10 * model.kv_bytes_per_token()


def kept_for_backward(model: Transformer, batch: int, length: int) -> int:
    """Bytes of the storages that autograd saves, weights and their buffers left out."""
    tensors = [*model.parameters(), *model.buffers()]
    own, kept = {t.untyped_storage().data_ptr() for t in tensors}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(torch.randint(0, 50, (batch, length)))
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_bytes_are_what_autograd_keeps(kind: str, dtype: torch.dtype) -> None:
    model = made(dtype, **KINDS[kind])
    for batch, length in ((2, 32), (3, 64)):
        kept = kept_for_backward(model, batch, length)
        assert model.activation_bytes(batch, length) == pytest.approx(kept, rel=0.15), (batch, length)


def test_activation_bytes_of_long_rows_and_other_devices() -> None:
    model = made(n_layers=1)
    assert model.activation_bytes(1, 600) == pytest.approx(kept_for_backward(model, 1, 600), rel=0.05)
    assert model.activation_bytes(1, 600, "cuda") < model.activation_bytes(1, 600) / 2
    for block in model.blocks:
        block.mixer.backend = "sdpa"  # fused, as on a GPU
    assert model.activation_bytes(1, 600, "cuda") == pytest.approx(kept_for_backward(model, 1, 600), rel=0.07)
