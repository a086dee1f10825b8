"""Attention: one interface (`nn/mixer.py`), a file for each member."""

from whorl.nn.attention.causal import Attention, LayerCache, causal_attention, causal_attention_reference

__all__ = ["Attention", "LayerCache", "causal_attention", "causal_attention_reference"]
