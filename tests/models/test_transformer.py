"""`Transformer`: blocks against formulas, decoding in pieces, packed rows, every mixer, cost, and bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.models.transformer_shapes import HEADS, KINDS, LATENT, LOCAL, ROUTED, config, made, network
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from whorl.errors import ConfigError
from whorl.models.language_model import saved_bytes
from whorl.models.transformer import Transformer
from whorl.models.transformer_config import MIXERS, CustomMixer, Rope, TransformerConfig
from whorl.models.transformer_cost import mean_causal_keys
from whorl.nn.rotary import RopeScaling

IDS = torch.randint(0, 50, (2, 13), generator=torch.Generator().manual_seed(2))
MAMBA, NEAR = CustomMixer(kind="mamba"), HEADS.model_copy(update={"window": 4})


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_transformer_decodes_in_pieces_like_one_forward(kind: str) -> None:
    model = network(kind)
    whole = model.logits(model(IDS))
    assert whole.dtype == torch.float32 and whole.shape == (2, 13, 50)
    for sizes in ([1, 3, 9], [1] * 13):
        state = model.new_state(2, 13)
        pieces = [model(ids, state=state) for ids in IDS.split(sizes, dim=1)]
        assert state.length == 13 and state.n_bytes > 0
        torch.testing.assert_close(model.logits(torch.cat(pieces, 1)), whole, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_packed_row_equals_documents_and_is_causal(kind: str) -> None:
    model, sizes = network(kind), [1, 6, 1, 5]
    positions = torch.cat([torch.arange(n) for n in sizes])
    segments = torch.arange(1, 5).repeat_interleave(torch.tensor(sizes))[None]
    packed = model(IDS[:1], positions=positions, segments=segments)
    alone = torch.cat([model(document) for document in IDS[:1].split(sizes, dim=1)], 1)
    torch.testing.assert_close(packed, alone, atol=2e-5, rtol=1e-4)
    packed.sum().backward()  # a document of one token may divide by zero
    assert all(p.grad.to_dense().isfinite().all() for p in model.parameters() if p.grad is not None)
    changed = IDS.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 50
    before, after = model(IDS), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(before[:, 7:], after[:, 7:], atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_state_segments_may_start_late_and_be_omitted(kind: str) -> None:
    """Without segments a row continues its last document; before the first it is in segment 0."""
    model, ids = made(**KINDS[kind]), IDS[:, :9]
    segments = torch.tensor([[0] * 3 + [1] * 6, [0] * 9])
    state = model.new_state(2, 9)
    parts = (None, segments[:, 2:5], None, None)
    pieces = ids.split((2, 3, 3, 1), dim=1)
    outs = [model(ids, segments=part, state=state) for ids, part in zip(pieces, parts, strict=True)]
    torch.testing.assert_close(torch.cat(outs, 1), model(ids, segments=segments), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["decoder", *KINDS])
def test_every_parameter_gets_a_gradient(kind: str) -> None:
    model = network(kind)
    ids = torch.randint(0, 50, (4, 32), generator=torch.Generator().manual_seed(3))
    F.cross_entropy(model.logits(model(ids)).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
    for name, p in model.named_parameters():
        # HSTU's time bias needs time stamps, which a text decoder does not have.
        trained = p.grad is not None and p.grad.to_dense().abs().sum() > 0
        assert trained or name.endswith("time_bias"), name


def test_shared_kv_reduces_cache_and_parameters() -> None:
    model, plain = made(kv_sharing_factor=3), made()
    assert model.kv_bytes_per_token() == plain.kv_bytes_per_token() / 3
    assert not any(n.startswith("blocks.1.mixer.k.") for n, _ in model.named_parameters())


@pytest.mark.parametrize("kind", ["linear", "pointwise", "mamba"])
def test_flops_of_custom_mixers_match_torch(kind: str) -> None:
    model, ids = made(**KINDS[kind]), torch.randint(0, 50, (1, 64))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.logits(model(ids))
    flops = model.flops_per_token(64) * 64 / 3
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.01)
    sparse = made(**KINDS["sparse"])  # strides of 3, and blocks of 4
    far = sum(min(i, 2) + 1 + i // 3 for i in range(64))
    near = sum(i % 4 + 1 for i in range(64))
    extra = sparse.flops_per_token(64) - sparse.flops_per_token(0)
    assert extra == pytest.approx(6 * 4 * 2 * 8 * (far + near + far) / 64)


@pytest.mark.parametrize("order", ["pre_norm", "sandwich", "after", "parallel", "post_norm"])
@torch.no_grad()
def test_block_matches_formula(order: str) -> None:
    changes = {"pre_norm": {}, "after": {"sandwich": True, "pre_norm": False}}.get(order, {order: True})
    model = made(n_layers=1, norm_offset=1.0, embedding_scale=3.0, **changes)
    block: Any = model.blocks[0]

    def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (1 + norm.weight)

    x = F.embedding(IDS, model.embedding) * 3.0
    if order == "parallel":
        h = rms(x, block.mixer_norm)
        x = x + block.mixer(h) + block.mlp(h)
    elif order == "post_norm":
        x = rms(x + block.mixer(x), block.mixer_norm)
        torch.testing.assert_close(model(IDS), rms(x + block.mlp(x), block.mlp_norm), atol=1e-5, rtol=1e-5)
        return
    elif order == "pre_norm":
        x = x + block.mixer(rms(x, block.mixer_norm))
        x = x + block.mlp(rms(x, block.mlp_norm))
    elif order == "after":
        x = x + rms(block.mixer(x), block.mixer_after)
        x = x + rms(block.mlp(x), block.mlp_after)
    else:
        x = x + rms(block.mixer(rms(x, block.mixer_norm)), block.mixer_after)
        x = x + rms(block.mlp(rms(x, block.mlp_norm)), block.mlp_after)
    torch.testing.assert_close(model(IDS), rms(x, model.final_norm), atol=1e-5, rtol=1e-5)


def test_new_model_is_seeded_and_nearly_uniform() -> None:
    a, b = (Transformer(config(experts=ROUTED), torch.Generator().manual_seed(4)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    loss = F.cross_entropy(a.logits(a(IDS)).flatten(0, 1), IDS.roll(-1, 1).flatten())
    assert abs(loss.item() - math.log(50)) < 0.1


def test_pattern_repeats_over_layers() -> None:
    shape = config(n_layers=7, mixers={"local": LOCAL, "full": HEADS}, pattern=("local", "local", "full"))
    assert shape.layer_names() == ["local", "local", "full"] * 2 + ["local"]
    blocks: Any = Transformer(shape).blocks
    assert [block.mixer.mask.window for block in blocks] == [3, 3, None, 3, 3, None, 3]
    assert blocks[0].mixer.rotary is blocks[1].mixer.rotary and blocks[2].mixer.rotary.base == 10_000.0
    assert TransformerConfig.model_validate_json(shape.model_dump_json()) == shape


def test_config_survives_json_with_every_mixer() -> None:
    yarn = HEADS.model_copy(update={"rope": Rope(scaling=RopeScaling("yarn", 4.0, 1024))})
    for changes in (*KINDS.values(), {"mixers": {"m": yarn}}):
        shape = config(**changes)
        again = TransformerConfig.model_validate_json(shape.model_dump_json())
        assert again == shape
        assert [type(m) for m in again.mixers.values()] == [type(m) for m in shape.mixers.values()]


def test_embedding_scale_is_rounded_to_compute_type() -> None:
    model = made(torch.bfloat16, embedding_scale=math.sqrt(3072))
    assert torch.equal(model.embed(IDS), F.embedding(IDS, model.embedding).bfloat16() * 55.5)


def test_logits_are_softcapped() -> None:
    model = made(logit_softcap=3.0)
    hidden = model(IDS) * 100
    plain = F.linear(hidden, model.head_weight)
    assert plain.abs().max() > 30
    torch.testing.assert_close(model.logits(hidden), 3 * torch.tanh(plain / 3))


def test_routings_come_from_expert_layers_only() -> None:
    model, routings = made(experts=ROUTED), []
    model(IDS, routings=routings)
    assert [int(r.counts.sum()) for r in routings] == [2 * 26, 2 * 26]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mixers": {"x": HEADS.model_dump() | {"n_kv_heads": 3}}}, r"n_heads \(4\) must be a multiple"),
        ({"mixers": {"x": HEADS.model_dump() | {"head_dim": 7}}}, r"head_dim \(7\)"),
        ({"mixers": {"x": {"kind": "mambo"}}}, "did you mean 'mamba'"),
        ({"pattern": ("ful",)}, "pattern names 'ful'.*did you mean 'full'"),
        ({"mixers": {"full": HEADS, "near": NEAR}, "pattern": ("full",)}, "'near' does not occur in pattern"),
        ({"mixers": {"full": HEADS, "slow": MAMBA}, "kv_sharing_factor": 2}, "kv_sharing_factor"),
        ({"mixers": {"full": HEADS, "near": NEAR}, "kv_sharing_factor": 2}, "layer 1 has not the window"),
        ({"parallel": True, "sandwich": True}, "exclude each other"),
        ({"pre_norm": False}, "pre_norm = false needs sandwich"),
        ({"mixers": {"x": HEADS.model_dump() | {"qk_norm": "heads"}}}, "'all_heads'"),
        (
            {"mixers": {"x": HEADS.model_dump() | {"qk_norm": "all_heads", "learned_temperature": True}}},
            "needs qk_norm = true",
        ),
        ({"norm": "layer", "norm_offset": 1.0}, "norm_offset"),
        ({"experts": ROUTED.model_copy(update={"dense_layers": (3,)})}, "dense_layers"),
        ({"experts": {"n_experts": 2, "top_k": 3, "hidden": 8}}, r"top_k \(3\)"),
        ({"mlp": "swigloo"}, "mlp"),
        ({"n_layer": 2}, "n_layer"),
    ],
)
def test_config_rejects_impossible_shape(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        config(**changes)


@pytest.mark.parametrize("kind", ["decoder", "plain", "gemma", "latent", *MIXERS])
def test_forward_rejects_bad_ids_states_and_segments(kind: str) -> None:
    model, ids = network(kind), torch.zeros(1, 5, dtype=torch.int64)
    rejected: list[tuple[str, torch.Tensor, dict[str, Any]]] = [
        ("token id 50", ids + 50, {}),
        ("token id -1", ids - 1, {}),
        ("ids have the shape", ids[:, :0], {}),
        ("ids have the shape", ids[:0], {}),
        ("the same number of rows", ids, {"state": model.new_state(2, 8)}),
        ("segments have the shape", ids, {"segments": ids[:, :4]}),
    ]
    if kind == "decoder":
        rejected += [("together with a state", ids, {"segments": ids, "state": model.new_state(1, 8)})]
    state = model.new_state(1, 4)
    if kind == "pointwise" or kind not in MIXERS:  # the state of the others has a fixed size
        rejected += [("capacity is 4", ids, {"state": state})]
    for message, given, options in rejected:
        with pytest.raises(ConfigError, match=message):
            model(given, **options)
    assert state.length == 0  # unchanged
    model(ids[:, :4], state=state)
    assert state.length == 4 and state.n_bytes > 0


def test_transformer_rejects_bad_mixer_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="options of 'mamba'"):
        made(mixers={"m": CustomMixer(kind="mamba", options={"heads": 2})})
    with pytest.raises(ConfigError, match="names the code 'absent:Mixer', which would run"):
        made(mixers={"m": CustomMixer(kind="absent:Mixer")})
    monkeypatch.setenv("WHORL_CODE", "absent:Mixer,torch.nn:Linear")
    with pytest.raises(ConfigError, match="cannot be imported: No module named 'absent'"):
        made(mixers={"m": CustomMixer(kind="absent:Mixer")})
    with pytest.raises(ConfigError, match="without new_state"):
        made(mixers={"m": CustomMixer(kind="torch.nn:Linear")})
    with pytest.raises(ValidationError, match=r"expected.*module:Class"):
        CustomMixer(kind="mambo")
    with pytest.raises(ConfigError, match="even number"):
        made(mixers={"m": LATENT.model_copy(update={"rope_dim": 7})})


def test_learned_positions_reject_positions_beyond_table() -> None:
    model = network("gpt", max_length=8)
    ids = torch.zeros(1, 9, dtype=torch.int64)
    with pytest.raises(ConfigError, match="max_length = 8"):
        model(ids)
    for wrong in (8, -1):
        with pytest.raises(ConfigError, match=f"position {wrong}"):
            model(ids[:, :2], positions=torch.tensor([7, wrong]))
    state = model.new_state(1, 12)
    model(ids[:, :8], state=state)
    with pytest.raises(ConfigError, match="a row of 9 positions"):
        model(ids[:, :1], state=state)


def test_params_counts_total_active_and_embedding() -> None:
    model = made(experts=ROUTED, learned_positions=True)
    counted = model.params()
    assert counted["total"] == sum(p.numel() for p in model.parameters())
    assert counted["embedding"] == 2 * 50 * 32 + 64 * 32
    # two layers of experts; each leaves 2 of 4 unused
    assert counted["total"] - counted["active"] == 2 * 2 * (3 * 24 * 32)
    assert made().params()["active"] == made().params()["total"]


def test_flops_match_torch() -> None:
    for changes in ({}, {"tie_embeddings": True, "mlp": "gelu"}, {"mixers": {"latent": LATENT}}):
        model, ids = made(n_layers=2, **changes), torch.randint(0, 50, (1, 64))
        for block in model.blocks:
            block.mixer.backend = "reference"  # torch does not count fused attention on a CPU
        with FlopCounterMode(display=False) as counter:
            model.logits(model(ids)).sum().backward()
        matrices = model.flops_per_token(0)
        # the reference computes all pairs of positions, masked ones too
        flops = 64 * (matrices + 2 * (model.flops_per_token(64) - matrices))
        assert flops == pytest.approx(counter.get_total_flops(), rel=0.01), changes
    assert mean_causal_keys(100, None) == mean_causal_keys(100, 100) == 50.0
    exact = sum(min(i + 1, 7) for i in range(1000)) / 1000
    assert mean_causal_keys(1000, 7) == pytest.approx(exact, rel=0.1)
    experts = made(experts=ROUTED)
    assert experts.flops_per_token(0) < 6 * experts.params()["active"]


def test_kv_bytes_per_token_matches_state() -> None:
    assert made().kv_bytes_per_token() == 3 * 2 * 2 * 8 * 4
    assert made(torch.bfloat16).kv_bytes_per_token() == 3 * 2 * 2 * 8 * 2
    assert made(mixers={"latent": LATENT}).kv_bytes_per_token() == 3 * (16 + 4) * 4
    assert made(mixers={"local": LOCAL, "full": HEADS}).kv_bytes_per_token() == 1 * 2 * 2 * 8 * 4
    assert made(**KINDS["mamba"]).kv_bytes_per_token() == 0
    model = made()
    assert model.new_state(3, 10).n_bytes == 3 * 10 * model.kv_bytes_per_token()


def saved(model: Transformer, batch: int, length: int) -> int:
    """Return the bytes that autograd saves in a forward, without weights and buffers."""
    ids = torch.randint(0, 50, (batch, length))
    return saved_bytes(lambda: model(ids), [*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_activation_bytes_match_autograd(kind: str, dtype: torch.dtype) -> None:
    model = made(dtype, **KINDS[kind])
    for batch, length in ((2, 32), (3, 64)):
        expected = saved(model, batch, length)
        assert model.activation_bytes(batch, length) == pytest.approx(expected, rel=0.15), (batch, length)


def test_activation_bytes_of_long_rows_and_cuda() -> None:
    model = made(n_layers=1)
    assert model.activation_bytes(1, 600) == pytest.approx(saved(model, 1, 600), rel=0.05)
    assert model.activation_bytes(1, 600, "cuda") < model.activation_bytes(1, 600) / 2
    for block in model.blocks:
        block.mixer.backend = "sdpa"  # fused, as on a GPU
    assert model.activation_bytes(1, 600, "cuda") == pytest.approx(saved(model, 1, 600), rel=0.07)
