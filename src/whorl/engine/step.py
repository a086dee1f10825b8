"""One decode step of a `Decoder` with everything constant taken out.

Decoding a small model is bound by the number of operations: the decoder's forward takes about 230 tensor operations of a
few microseconds each, four fifths of the time per token. `DecodeStep` is that forward for one new token per row, with
these differences:

- the gain of a norm and its sqrt(d) are folded into the weights of the next product, once;
- queries and keys are normalized and rotated together;
- modules, splits and the document mask are left out.

`Decoder.forward` is the reference, and a test compares them. Prompts still run through it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.models import Decoder, DecoderState
from whorl.models.decoder import DecoderBlock
from whorl.nn.mlp import activate
from whorl.nn.norm import EPS


@dataclass
class _Layer:
    """A block's weights for decoding; matrices [out, in] in the compute dtype."""

    qkv: Tensor
    scale: Tensor  # [n_heads + n_kv_heads, 1] fp32: temperature * sqrt(head_dim) for queries, sqrt(head_dim) for keys
    smear: Tensor | None  # [n_kv_heads, 1] fraction of the previous key
    out: Tensor
    up: Tensor
    down: Tensor


class DecodeStep:
    """Computes `model.logits(model(ids, state=state)[:, -1])` for one id per row, up to rounding.

    It holds copies of the current weights: make a new one after they change.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.dtype = model, model.dtype
        c = model.config
        self.heads = (c.n_heads, c.n_kv_heads, c.head_dim)
        device = model.embedding.device
        width, head = math.sqrt(c.d_model), math.sqrt(c.head_dim)

        def folded(weight: Tensor, gain: Tensor) -> Tensor:
            return (weight.float() * (gain * width)).to(self.dtype)

        with torch.no_grad():
            self.floor, self.head_floor = (
                torch.tensor(math.sqrt(EPS) * d, device=device) for d in (width, head)
            )
            self.first_gain = model.embedding_norm.weight * width
            self.layers = []
            for block in cast(Iterable[DecoderBlock], model.blocks):
                attention, mlp = block.attention, block.mlp
                keys = torch.ones(c.n_kv_heads, 1, device=device)
                self.layers.append(
                    _Layer(
                        qkv=folded(attention.qkv.weight, block.attention_norm.weight),
                        scale=torch.cat([attention.temperature, keys]) * head,
                        smear=None
                        if attention.smear is None
                        else torch.sigmoid(attention.smear).to(self.dtype),
                        out=attention.out.weight.to(self.dtype),
                        up=folded(mlp.up.weight, block.mlp_norm.weight),
                        down=mlp.down.weight.to(self.dtype),
                    )
                )
            self.head = folded(model.head_weight, model.final_norm.weight)

    @torch.inference_mode()
    def __call__(self, ids: Tensor, state: DecoderState) -> Tensor:
        """Return logits [B, vocab] fp32 for ids [B, 1], the newest token of each row; extends the state by one position."""
        at = state.length
        rotary = self.model.rotary_for(state.capacity)
        cos, sin = (t[0] for t in rotary.tables_between(at, at + 1, ids.device))  # [1, head_dim]
        # x: [B, d_model]
        x = (_unit(self.model.embed(ids, state=state)[:, 0], self.floor) * self.first_gain).to(self.dtype)
        n_heads, n_kv, d = self.heads
        batch, group, turning = x.shape[0], n_heads // n_kv, n_heads + n_kv
        for layer, past in zip(self.layers, state.layers, strict=True):
            qkv = F.linear(_unit(x, self.floor).to(self.dtype), layer.qkv).view(batch, turning + n_kv, d)
            qk = qkv.narrow(1, 0, turning)
            if layer.smear is not None:
                k = qk.narrow(1, n_heads, n_kv)
                before, past.last_key = past.last_key[:, 0] if at else k, k.clone().unsqueeze(1)
                k.add_(layer.smear * (before - k))
            qk = (_unit(qk, self.head_floor) * layer.scale).to(self.dtype)
            qk = torch.addcmul(qk * cos, qk.roll(d // 2, -1), sin)
            past.k[:, :, at] = qk.narrow(1, n_heads, n_kv)
            past.v[:, :, at] = qkv.narrow(1, turning, n_kv)
            past.length = at + 1
            q = qk.narrow(1, 0, n_heads).reshape(batch, n_kv, group, d)
            scores = (q @ past.k.narrow(2, 0, at + 1).mT).float()
            y = scores.softmax(dim=-1).to(self.dtype) @ past.v.narrow(2, 0, at + 1)
            x = x + F.linear(y.view(batch, n_heads * d), layer.out)
            h = activate(F.linear(_unit(x, self.floor).to(self.dtype), layer.up), self.model.config.mlp)
            x = x + F.linear(h, layer.down)
        return F.linear(_unit(x, self.floor).to(self.dtype), self.head).float()


def _unit(x: Tensor, floor: Tensor) -> Tensor:
    """Scale x [..., d] to norm 1 in fp32, which is its RMS norm over sqrt(d); floor: [] sqrt(epsilon d)."""
    x32 = x.float()
    return x32 / torch.hypot(torch.linalg.vector_norm(x32, dim=-1, keepdim=True), floor)
