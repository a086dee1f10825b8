"""Attention layers. All implement the `Mixer` interface of `nn/mixer.py`.

causal.py       grouped queries, QK-norm and smeared keys, as in the plain decoder; the blocked path for CPUs
multi_head.py   multi-head, grouped-query, multi-query and cross-attention, with the options of published models
mla.py          multi-head latent attention (DeepSeek-V2 and V3): the cache holds a latent
linear.py       linear attention: time linear in length, a state of fixed size
hstu.py         HSTU: SiLU in place of the softmax, biases by distance and by time
mask.py         which keys a query may attend to
backends.py     softmax attention by several backends
state.py        the KV cache of one layer; paged.py: its paged form
token_cache.py  base of mixers that keep other tensors per token
short_conv.py   smeared keys and short causal convolutions
"""

from whorl.nn.attention.backends import BACKENDS, attend
from whorl.nn.attention.causal import causal_attention, causal_attention_reference
from whorl.nn.attention.hstu import HSTUAttention, HSTUState
from whorl.nn.attention.linear import LinearAttention, LinearState
from whorl.nn.attention.mask import Mask
from whorl.nn.attention.mla import LatentState, MultiHeadLatentAttention
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.attention.short_conv import ShortConvolution, ShortConvState, Smear
from whorl.nn.attention.state import KeyValues, KeyValueState

__all__ = [
    "BACKENDS",
    "HSTUAttention",
    "HSTUState",
    "KeyValueState",
    "KeyValues",
    "LatentState",
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
