"""Attention: one interface (`nn/mixer.py`), a file for each member.

causal.py      the decoder's own: grouped queries, QK-norm, smeared keys; the blocked path for CPUs
heads.py       multi-head, grouped-query, multi-query and cross-attention, with what published models vary
latent.py      multi-head latent attention (DeepSeek-V2 and V3): the cache holds a latent
linear.py      a kernel in place of the softmax: time linear in length, a state of fixed size
pointwise.py   HSTU: SiLU in place of the softmax, biases by distance and time
mask.py, backends.py, state.py, short.py   who sees whom; how it is computed; what decoding keeps; short mixing
"""

from whorl.nn.attention.backends import BACKENDS, attend
from whorl.nn.attention.causal import Attention, LayerState, causal_attention, causal_attention_reference
from whorl.nn.attention.hstu import HSTUAttention, HSTUState
from whorl.nn.attention.linear import LinearAttention, LinearState
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.mla import LatentState, MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.short_conv import ShortConvolution, ShortConvState, Smear
from whorl.nn.attention.state import KeyValues, KeyValueState

__all__ = [
    "BACKENDS",
    "Attention",
    "HSTUAttention",
    "HSTUState",
    "KeyValueState",
    "KeyValues",
    "LatentState",
    "LayerState",
    "LinearAttention",
    "LinearState",
    "Mask",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "ShortConvState",
    "ShortConvolution",
    "Smear",
    "attend",
    "causal_attention",
    "causal_attention_reference",
]
