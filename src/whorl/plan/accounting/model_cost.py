"""Costs of a model from its shape: parameters, FLOPs, and bytes of training, serving and files.

    cost = ModelCost(known_models()["llama-3-8b"])
    cost.parameters()["total"]                      # 8,030,261,248
    cost.cache_bytes(EngineConfig())                # what an engine allocates
    zero_bytes(7.5e9, devices=64, stage=3)          # bytes per device

The network is made on the meta device, so a model of any size costs no memory. FLOPs are those of matrix products, as
`models/transformer_cost.py` counts them.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any, NamedTuple

import torch

from whorl.engine.build import cache_pages
from whorl.engine.cache.layer_cache import LayerCaches
from whorl.engine.config import EngineConfig
from whorl.models import Transformer, TransformerConfig, make_model, whorl_decoder
from whorl.models.exchange import read_config
from whorl.nn.compiler import meta_device
from whorl.train.checkpoint.rng_state import rng_tensors
from whorl.train.checkpoint.staging import FileLayout
from whorl.train.config import OptimConfig
from whorl.train.learner.learner import SharedState
from whorl.train.lm.objective import param_optims

PROCESS_OVERHEAD_BYTES = 800e6  # measured: a training process with compiled graphs, allocator and loader
# Bytes per parameter of weights, gradients and optimizer state with Adam. "bf16" keeps an fp32 copy of the weights there.
TRAINING_BYTES = {"bf16": (2, 2, 12), "fp32": (4, 4, 8)}


def decoder_config(d_model: int, n_layers: int, vocab_size: int, **fields: Any) -> TransformerConfig:
    """Return a `whorl_decoder` of a width and a depth: heads of 64 (32 where 64 does not divide), MLP width 4 d_model.

    fields: further arguments of `whorl_decoder`.
    """
    head_dim = 64 if d_model % 64 == 0 else 32
    heads = d_model // head_dim
    sizes = {"n_heads": heads, "n_kv_heads": heads, "head_dim": head_dim, "mlp_hidden": 4 * d_model}
    return whorl_decoder(vocab_size, d_model, n_layers, **{**sizes, **fields})


class TrainingCost(NamedTuple):
    """Training cost of a shape. token_flops: forward and backward. activation_bytes: the part of peak_memory_bytes that
    `pretrain.run.activation_budget` and `pretrain.train.micro_batch_size` lower.
    """

    block_params: int  # weights of the layers that a token uses
    head_params: int
    lookup_params: int
    total_params: int  # with unused experts
    token_flops: float
    peak_memory_bytes: float
    activation_bytes: float

    @property
    def matmul_params(self) -> int:
        """Return the number of weights that a token is multiplied with."""
        return self.block_params + self.head_params


def training_cost(c: TransformerConfig, *, batch_size: int, seq_len: int, replicas: int) -> TrainingCost:
    """Return the cost of a shape in steps of `batch_size` rows over all replicas.

    Dense weights have an fp32 copy, a gradient per replica and two moments. N-gram tables count weights only, since their
    optimizer state is one number per row.
    """
    model = ModelCost(c, "fp32").model
    sizes, head, tokens = model.params(), c.vocab_size * c.d_model, batch_size * seq_len
    kept = model.activation_bytes(batch_size, seq_len, device="cpu")
    weights = 4.0 * ((sizes["total"] - sizes["ngram"]) * (3 + replicas) + sizes["ngram"])
    peak = weights + kept + 8.0 * tokens * c.d_model + PROCESS_OVERHEAD_BYTES * replicas
    params = model.matrix_params() - head, head, sizes["embedding"] - head + sizes["ngram"], sizes["total"]
    return TrainingCost(*params, model.flops_per_token(seq_len), peak, kept)


@cache
def known_models() -> Mapping[str, TransformerConfig]:
    """Return the shapes of published models by name."""
    tables = tomllib.loads(files(__package__).joinpath("known_models.toml").read_text("utf-8"))
    return {name: read_config(fields, f"the known model {name}") for name, fields in tables.items()}


def zero_bytes(parameters: float, devices: int, stage: int, each: Sequence[int] = (2, 2, 12)) -> float:
    """Return bytes per device of weights, gradients and optimizer state, of `each` bytes per parameter, with ZeRO
    (arXiv:1910.02054, figure 1). stage 0: nothing is shared; 1: optimizer state; 2: gradients, too; 3: weights, too.
    """
    divisors = (devices if stage >= least else 1 for least in (3, 2, 1))
    return parameters * sum(n / divisor for n, divisor in zip(each, divisors, strict=True))


@dataclass(frozen=True)
class ModelCost:
    """Costs of a decoder. format: of the weights of products; activations and cache have 16 or 32 bits."""

    config: TransformerConfig
    format: str = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """The type of activations and cache."""
        wide = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
        return wide.get(self.format, torch.bfloat16)

    @cached_property
    def model(self) -> Transformer:
        """The network: without memory where formulas give its cost; custom mixers are measured."""
        with nullcontext() if self.config.has_custom_mixers else meta_device():
            return make_model(self.config, dtype=self.dtype)

    def parameters(self) -> dict[str, int]:
        """Count parameters by part; "total"; "active": used by one token."""
        parts = Counter[str]()
        for name, p in self.model.named_parameters():
            parts[part_of(name)] += p.numel()
        sizes = self.model.params()
        return {**parts, "total": sizes["total"], "active": sizes["active"]}

    @property
    def embedding_share(self) -> float:
        """The share of tables of ids and positions, of n-gram tables and of the head in all parameters."""
        sizes = self.model.params()
        return (sizes["embedding"] + sizes["ngram"]) / sizes["total"]

    def activation_bytes(
        self, rows: int, length: int, *, recompute: bool = False, device: str = "cuda"
    ) -> float:
        """Return the bytes that a forward keeps for the backward, without logits. recompute: each block, from its input."""
        kept, n = self.model.activation_bytes(rows, length, device), self.config.n_layers
        outside = rows * length * (8 + 8 * self.config.d_model)
        inputs = n * rows * length * self.config.d_model * self.dtype.itemsize
        return outside + inputs + (kept - outside) / n if recompute else kept

    def cache_bytes(self, engine: EngineConfig) -> int:
        """Return the bytes that an engine with these settings allocates for keys and values, latents and states."""
        rows, length, mixers = engine.max_num_seqs, engine.max_model_len, self.model.layer_mixers()
        pages, code = cache_pages(self.model, engine, length), {"int8": torch.int8}.get(engine.kv_cache_dtype)
        sizes = pages, engine.block_size, rows, length
        return LayerCaches(mixers, *sizes, dtype=self.dtype, cache_dtype=code, device="meta").n_bytes

    def checkpoint_bytes(self, optim: OptimConfig | None = None) -> int:
        """Return the bytes of the file `state.safetensors` of a training checkpoint of one rank."""
        with meta_device():
            shared = SharedState.allocate(self.model, param_optims(self.model, optim or OptimConfig()))
        return FileLayout.from_tensors({**shared.tensors(), **rng_tensors()}).n_bytes


def part_of(name: str) -> str:
    """Return the part of the network that a parameter belongs to."""
    if "norm" in name:
        return "norms"
    if not name.startswith("blocks."):
        return {"memory": "n-gram tables"}.get(name.partition(".")[0], name)
    kind, _, inside = name.split(".", 2)[2].partition(".")
    found = inside.partition(".")[0]
    return "attention" if kind == "mixer" else found if found in ("experts", "router") else "mlp"
