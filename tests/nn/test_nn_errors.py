"""Invalid arguments of layers raise a ConfigError that names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.engine.additive_attention import AdditiveAttention
from tests.support.nn.checks import gen, randn

from whorl.errors import ConfigError
from whorl.nn import NGramEmbedding, rotary_tables
from whorl.nn.absolute_positions import LearnedPositions, SinusoidalPositions, alibi_slopes
from whorl.nn.attention import HSTUAttention, LinearAttention, MultiHeadAttention, MultiHeadLatentAttention
from whorl.nn.attention.backends import attend
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.short_conv import ShortConvolution, Smear
from whorl.nn.attention.token_cache import TokenCacheMixer
from whorl.nn.convolution import Conv2d, ConvTranspose2d, ResizeConv
from whorl.nn.experts import MixtureOfExperts, MoERouter
from whorl.nn.mamba import Mamba
from whorl.nn.mlp import MLP
from whorl.nn.norm import BatchNorm, GroupNorm
from whorl.nn.patches import PatchEmbedding, to_patches
from whorl.nn.quantized_linear import QuantizedLinear
from whorl.nn.recurrent import GRU, RNN
from whorl.nn.rotary import RopeScaling, Rotary, rotary_frequencies, to_interleaved

SEGMENTS = torch.tensor([[3, 3, 3, 3, 1, 2, 2, 2, 2], [5] * 9])
LAYOUT = torch.eye(5).bool()
ROTARY = Rotary(8, 10_000.0, torch.float32)
X = randn(2, 11, 32, seed=5)
Q, K, V = (torch.randn(2, n, 9, d, generator=gen()) for n, d in ((4, 8), (2, 8), (2, 6)))


def heads(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(32, 4, generator=gen(), **options)


def call(layer: Any, x: torch.Tensor, rows: int | None = None, capacity: int = 4, **options: Any) -> Any:
    """Call a layer, with a new state of `rows` rows if given."""
    return layer(x, state=layer.new_state(rows, capacity), **options) if rows else layer(x, **options)


def after_one_call(layer: Any, x: torch.Tensor, **second: Any) -> Any:
    """Call a layer on a first position of a new state, and then on `x`."""
    state = layer.new_state(1, 6)
    layer(x, state=state)
    return layer(x, state=state, **second)


def tokens(**options: Any) -> AdditiveAttention:
    return AdditiveAttention(32, generator=gen(), **options)


CASES: list[tuple[str, Callable[[], Any]]] = [
    # Tensors per token.
    ("shapes are {}", lambda: TokenCacheMixer({})),
    ("with sizes from 1", lambda: TokenCacheMixer({"key": (0,)})),
    ("window is 0", lambda: tokens(window=0)),
    (r"AdditiveAttention stores \['value'\]", lambda: tokens().store(None, None, value=X)),
    (r"'key' of the shape \[2, 11, 32\]", lambda: tokens().store(None, None, key=X, value=X)),
    ("the same number of rows", lambda: call(tokens(), X, rows=1, capacity=11)),
    # Positions.
    *((rf"position {p} .*n_positions = 8", lambda p=p: LearnedPositions(8, 4)(torch.tensor([0, p, 3])))
      for p in (8, 1000, -1)),
    (r"position 9 .*n_positions = 8", lambda: LearnedPositions(8, 4).between(4, 10)),
    ("n_positions is 0", lambda: LearnedPositions(0, 4)),
    ("d is 5", lambda: SinusoidalPositions(5)),
    ("n_heads is 0", lambda: alibi_slopes(0)),
    ("head_dim is 7", lambda: Rotary(7, 1e4, torch.float32)),
    ("head_dim is 7", lambda: rotary_tables(torch.arange(3), 7)),
    ("rotary_dim is 3", lambda: Rotary(8, 1e4, torch.float32, rotary_dim=3)),
    ("rotary_dim is 10", lambda: Rotary(8, 1e4, torch.float32, rotary_dim=10)),
    ("rotary_dim is 0", lambda: Rotary(8, 1e4, torch.float32, rotary_dim=0)),
    ("layout is 'halves'", lambda: Rotary(8, 1e4, torch.float32, layout="halves")),
    ("layout is 'x'", lambda: rotary_tables(torch.arange(3), 8, layout="x")),
    ("did you mean 'yarn'", lambda: RopeScaling("yarm", 2.0)),
    ("factor is 0.5", lambda: RopeScaling("linear", 0.5)),
    ("original_length is None", lambda: RopeScaling("yarn", 2.0)),
    ("low is 4.0 and high is 4.0", lambda: RopeScaling("llama3", 2.0, 64, low=4.0)),
    ("head_dim is 2", lambda: rotary_frequencies(2, scaling=RopeScaling("ntk", 2.0))),
    ("weight has 12 rows", lambda: to_interleaved(torch.arange(12), 3, 6)),
    # Norms, MLP, n-grams.
    ("groups is 4 and channels is 6", lambda: GroupNorm(4, 6)),
    (r"x has shape \[4, 5, 6\]", lambda: GroupNorm(2, 6)(torch.zeros(4, 5, 6))),
    (r"x has shape \[4, 5, 6\]", lambda: BatchNorm(6)(torch.zeros(4, 5, 6))),
    ("1 value per channel", lambda: BatchNorm(6)(torch.randn(1, 6))),
    (r"mlp kind is 'gleu'[\s\S]*did you mean", lambda: MLP(8, 16, "gleu")),
    ("ngram_orders", lambda: NGramEmbedding([1], 64, 8)),
    # Convolutions and patches.
    ("groups is 3", lambda: Conv2d(4, 6, 3, groups=3)),
    ("stride is 0", lambda: Conv2d(4, 6, 3, stride=0)),
    ("kernel_size is 2", lambda: ConvTranspose2d(4, 6, 2, stride=3)),
    ("kernel_size is 2 at stride 1", lambda: ConvTranspose2d(4, 6, 2, stride=1)),
    ("kernel_size is 4", lambda: ResizeConv(4, 6, 4)),
    ("mode is 'cubic'", lambda: ResizeConv(4, 6, mode="cubic")),
    ("patch is 3 and the image 8 x 6", lambda: to_patches(torch.zeros(1, 1, 8, 6), 3)),
    (r"images are \[8, 6\]", lambda: to_patches(torch.zeros(8, 6), 2)),
    ("2 channels", lambda: PatchEmbedding(1, 2, 8)(torch.zeros(1, 2, 4, 4))),
    # Masks and backends.
    ("window is 0", lambda: Mask(window=0)),
    ("stride is 0", lambda: Mask(stride=0)),
    ("block is 0", lambda: Mask(block=0)),
    ("offset is -1", lambda: Mask(offset=-1)),
    ("only one of query_segments", lambda: Mask(key_segments=SEGMENTS)),
    ("key_allowed is of type", lambda: Mask(key_allowed=torch.ones(1, 3))),
    ("key_segments has the shape", lambda: Mask(query_segments=SEGMENTS, key_segments=SEGMENTS[0])),
    ("layout does not fit", lambda: Mask(layout=LAYOUT)),
    ("layout has the shape", lambda: Mask(block=1, layout=LAYOUT).dense(9, 9)),
    ("key_allowed has the shape", lambda: Mask(key_allowed=torch.ones(2, 5).bool()).dense(6, 6)),
    ("softcap is given", lambda: attend(Q, K, V, Mask(), softcap=1.0, backend="sdpa")),
    ("sink is given", lambda: attend(Q, K, V, Mask(), sink=torch.zeros(4), backend="sdpa")),
    ("no backward", lambda: attend(Q.clone().requires_grad_(), K, V, Mask(), backend="flex")),
    ("backend is 'flash'", lambda: attend(Q, K, V, Mask(), backend="flash")),
    ("H a multiple of KV", lambda: attend(Q[:, :3], K, V, Mask())),
    ("bias has the shape", lambda: attend(Q, K, V, Mask(), bias=torch.zeros(4, 9, 10))),
    ("sink has the shape", lambda: attend(Q, K, V, Mask(), sink=torch.zeros(5))),
    ("softcap is 0", lambda: attend(Q, K, V, Mask(), softcap=0.0)),
    ("at the end of their row", lambda: attend(Q, K, V, Mask(causal=False), backend="blocked")),
    ("at the end of their row", lambda: attend(Q, K, V, Mask(window=3), backend="blocked")),
    ("at the end of their row", lambda: attend(Q, K, V, Mask(key_allowed=SEGMENTS > 0), backend="blocked")),
    # Multi-head attention.
    ("n_heads is 3", lambda: MultiHeadAttention(32, 3, n_kv_heads=2, head_dim=8)),
    ("n_heads is 4 and n_kv_heads is 3", lambda: heads(n_kv_heads=3)),
    ("n_kv_heads is 0", lambda: heads(n_kv_heads=0)),
    ("d_model is 30", lambda: MultiHeadAttention(30, 4)),
    ("rotary.head_dim is 8", lambda: heads(rotary=ROTARY, head_dim=16)),
    ("backend is 'fast'", lambda: heads(backend="fast")),
    ("window is 0", lambda: heads(window=0)),
    ("rotary and context_dim", lambda: heads(rotary=ROTARY, context_dim=8)),
    ('projections is "shared"', lambda: heads(projections="shared", smear=True)),
    ("x has the shape", lambda: heads()(X[..., :5])),
    ("context is given", lambda: heads()(X, context=X)),
    ("context is missing", lambda: heads(context_dim=12)(X)),
    ("context has the shape", lambda: heads(context_dim=12)(X, context=X)),
    ('scale is "learned"', lambda: heads(scale="learned")),
    ('projections is "fused"', lambda: heads(projections="fused", context_dim=8)),
    ("projections is 'none'", lambda: heads(projections="none")),
    ("shared_kv is missing", lambda: heads(projections="shared")(X)),
    ("shared_kv has keys", lambda: heads()(X, shared_kv=(X[:, None], X[:, None]))),
    ("the state 3", lambda: call(heads(), X, 3, 11)),
    ("capacity is 0", lambda: heads().new_state(2, 0)),
    ("causal is False", lambda: heads(causal=False).new_state(2, 5)),
    ("segments has the shape", lambda: heads()(X, segments=torch.ones(2, 3))),
    ("key_allowed is given", lambda: call(heads(), X, 2, 11, key_allowed=torch.ones(2, 11).bool())),
    ("bias is given", lambda: heads(alibi=True)(X, bias=torch.zeros(4, 11, 11))),
    ("width is 0", lambda: ShortConvolution(4, 0)),
    ("x has the shape", lambda: ShortConvolution(4, 2)(torch.zeros(1, 3, 5))),
    ("the state is of 2 rows", lambda: Smear(2)(torch.zeros(1, 3, 2, 4), None, Smear(2).new_state(2, 4))),
    # Other mixers.
    ("n_heads is 3", lambda: HSTUAttention(16, 3)),
    ("max_distance", lambda: HSTUAttention(16, 2, max_distance=0)),
    ("n_time_buckets", lambda: HSTUAttention(16, 2, n_time_buckets=0)(torch.zeros(1, 4, 16), times=torch.zeros(1, 4))),
    ("times are given with some",
     lambda: after_one_call(HSTUAttention(16, 2), torch.zeros(1, 1, 16), times=torch.zeros(1, 1))),
    ("n_heads is 5", lambda: LinearAttention(24, 5)),
    ("chunk is 0", lambda: LinearAttention(24, 3, chunk=0)),
    ("kv_rank is 0", lambda: MultiHeadLatentAttention(24, 3, kv_rank=0, nope_dim=8, rope_dim=4, v_dim=6, rotary=None)),
    ("rope_dim is 4",
     lambda: MultiHeadLatentAttention(24, 3, kv_rank=20, nope_dim=8, rope_dim=4, v_dim=6, rotary=ROTARY)),
    ("d_state is 0", lambda: Mamba(8, d_state=0)),
    ("chunk is 0", lambda: Mamba(8, chunk=0)),
    ("delta_min is", lambda: Mamba(8, delta_min=0.2)),
    ("x has the shape", lambda: Mamba(8)(torch.zeros(1, 2, 5))),
    ("state is of 2 rows", lambda: call(Mamba(8), torch.zeros(1, 2, 8), 2)),
    ("d_hidden is 0", lambda: RNN(4, 0)),
    ("backend is 'quick'", lambda: RNN(4, backend="quick")),
    ("x has the shape", lambda: GRU(4)(torch.zeros(1, 2, 5))),
    ("a document begins inside",
     lambda: GRU(4, backend="fused")(torch.zeros(1, 2, 4), segments=torch.tensor([[0, 1]]))),
    ("state is of 2 rows", lambda: call(GRU(4), torch.zeros(1, 2, 4), 2)),
    # Mixture of experts.
    ("d = 16", lambda: MixtureOfExperts(16, 12, 8, 2)(torch.zeros(2, 15))),
    ("no balance bias", lambda: MoERouter(16, 8, 2).update_balance_bias(torch.zeros(8))),
    *((named, lambda o=options: MixtureOfExperts(16, 12, **{"n_experts": 8, "top_k": 2, **o})) for named, options in [
        ("top_k", {"top_k": 9}), ("top_k", {"top_k": 0}), ("n_experts", {"n_experts": 0, "top_k": 0}),
        ("norm_topk_prob", {"top_k": 1}), ("routing", {"routing": "dropples"}), ("scoring", {"scoring": "tanh"}),
        ("overflow", {"overflow": "spill"}), ("capacity_factor", {"capacity_factor": 0.0}),
        ("expert_dropout", {"expert_dropout": 1.0}), ("token_dropout", {"token_dropout": -0.1}),
        ("groups", {"groups": (3, 1)}), ("groups", {"groups": (4, 5)}), ("top_k", {"groups": (8, 1)}),
        ("bias_balance", {"routing": "expert_choice", "bias_balance": True}),
        ("groups", {"routing": "expert_choice", "groups": (4, 2)}),
        ("kind", {"kind": "tanh"}), ("shared_gate", {"shared_gate": True}),
    ]),
    # Quantized weights.
    (r"group 64 does not divide the 96 columns[\s\S]*32", lambda: QuantizedLinear(96, 32, "int8", 64)),
    ("dynamic, with int4", lambda: QuantizedLinear(64, 32, "int4", 32, dynamic=True)),
    ("dynamic, with int8 in groups of 32", lambda: QuantizedLinear(64, 32, "int8", 32, dynamic=True)),
    ("even number", lambda: QuantizedLinear(63, 32, "int4")),
    ("int5", lambda: QuantizedLinear(64, 32, "int5")),
]  # fmt: skip


@pytest.mark.parametrize(("message", "make"), CASES, ids=[message for message, _ in CASES])
def test_layer_raises_for_invalid_arguments(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
