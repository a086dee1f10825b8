"""Layers, each written once: norms, positions, attention, MLPs, experts, recurrent layers, convolutions, kernels.

Layers do not depend on objectives or optimizers. Weights are kept in fp32 (the master copy) and cast to the type of
the activations where they are used, so a module runs in the type that is fastest on the machine.
"""

from whorl.nn.attention import (
    Mask,
    MultiHeadAttention,
    MultiHeadLatentAttention,
    attend,
    causal_attention,
    causal_attention_reference,
)
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.gpu.tiled_attention import tiled_attention
from whorl.nn.linear import Linear
from whorl.nn.mlp import MLP
from whorl.nn.ngram import NGramEmbedding
from whorl.nn.norm import LayerNorm, RMSNorm, rms_norm
from whorl.nn.rotary import Rotary, apply_rotary, rotary_tables

__all__ = [
    "MLP",
    "LayerNorm",
    "Linear",
    "Mask",
    "MixtureOfExperts",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "NGramEmbedding",
    "RMSNorm",
    "Rotary",
    "apply_rotary",
    "attend",
    "causal_attention",
    "causal_attention_reference",
    "rms_norm",
    "rotary_tables",
    "tiled_attention",
]
