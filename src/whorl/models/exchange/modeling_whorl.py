"""Whorl's decoder for `transformers`. `whorl export --to hf` copies this file next to the weights.

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)

    x  = rms(embedding[ids] + sum over n of table_n[hash of the last n ids])     [B, T, hidden_size]
    x += attention(rms(x));  x += mlp(rms(x))                                    num_hidden_layers times
    logits = head(rms(x))                                                        [B, T, vocab_size]

- Attention: one matrix for queries, keys and values. Each key is mixed with its predecessor ("smeared"), queries and keys
  are RMS-normed and rotated (arXiv:2104.09864), and each query head has a learned temperature in place of 1 / sqrt(d).
- MLP: squared ReLU (arXiv:2109.08668).
- With `trained_length` below `max_position_embeddings`, rotary tables are YaRN's (arXiv:2309.00071), for short rows too:
  a row's tables must not change while it grows. Set both equal to compute short rows exactly as in training.

The cache holds keys and values as projected, and the ids in one further layer. Keys are smeared, normed and rotated again
at every call, so beams, left padding and cropping need no further state.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

try:
    from transformers import PreTrainedConfig
except ImportError:  # before transformers 5
    from transformers import PretrainedConfig as PreTrainedConfig

MULTIPLIER, MASK = 0x9E3779B1, (1 << 32) - 1  # of the n-gram hash
YARN_FACTOR, YARN_LOW, YARN_HIGH = 4.0, 0.5, 4.0

# ngram_orders: lengths of the n-grams, () for none; ngram_buckets: rows of the table of each length; logit_softcap: c in
# c tanh(z / c); trained_length: positions of a row in training.
FIELDS = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "hidden_act": "relu2", "rms_norm_eps": 1e-6, "rope_base": 10_000.0,
    "smear_keys": True, "ngram_orders": (2, 3), "ngram_buckets": 65_536, "logit_softcap": None, "trained_length": None,
    "original_max_length": 4096, "max_position_embeddings": 4096, "use_cache": True,
}  # fmt: skip


class WhorlConfig(PreTrainedConfig):
    """The shape: `FIELDS` with their defaults."""

    model_type = "whorl_decoder"

    def __init__(self, tie_word_embeddings=False, **kwargs):
        for name, default in FIELDS.items():
            setattr(self, name, kwargs.pop(name, default))
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


def rms_norm(x, gain=None, eps=1e-6):
    """Return x [..., d] / rms(x) * gain, computed in fp32."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y if gain is None else y * gain).to(x.dtype)


class WhorlRMSNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(config.hidden_size)), config.rms_norm_eps

    def forward(self, x):
        return rms_norm(x, self.weight, self.eps)


def ngram_rows(ids, length, orders, buckets):
    """Return the table row of the n-gram that ends at each of the last `length` positions: [B, length] per order.

    ids: [B, S], -1 where there is no token.
    """
    reach = max(orders) - 1
    padded = F.pad(ids, (reach, 0), value=-1)[:, -(length + reach) :]
    rows, state = [], (padded[:, reach:] + 1) * MULTIPLIER & MASK
    for back in range(1, reach + 1):
        previous = padded[:, reach - back : reach - back + length]
        state = ((state ^ (state >> 15)) * 0x2C1B3C6D + (previous + 2) * MULTIPLIER) & MASK
        if back + 1 in orders:
            mixed = (state ^ (state >> 16)) * 0x45D9F3B & MASK
            rows.append((mixed ^ (mixed >> 13)) % buckets)
    return rows


def rotary_tables(config, positions):
    """Return (cos, sin) of positions [B, S], each [B, 1, S, head_dim]; sin has the signs of the rotation."""
    dim, trained, gain = config.head_dim, config.trained_length, 1.0
    frequency = config.rope_base ** (-torch.arange(0, dim, 2, device=positions.device).float() / dim)
    if trained and max(positions.shape[1], config.max_position_embeddings) > trained:
        # Waves with more turns than HIGH in `trained` positions stay, those with fewer than LOW are slowed down.
        first, last = (
            dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_base))
            for turns in (YARN_HIGH, YARN_LOW)
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), dim - 1)
        index = torch.arange(dim // 2, device=positions.device).float()
        stays = 1.0 - ((index - first) / max(last - first, 1e-3)).clamp(0.0, 1.0)
        frequency = frequency * stays + frequency / YARN_FACTOR * (1.0 - stays)
        gain = 0.1 * math.log(YARN_FACTOR) + 1.0
    angle = positions[:, None, :, None].float() * frequency
    cos, sin = angle.cos() * gain, angle.sin() * gain
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x, cos, sin):
    """Return x [B, H, T, head_dim] rotated; feature i is paired with i + head_dim / 2."""
    return (x * cos.to(x.dtype) + x.roll(x.shape[-1] // 2, dims=-1) * sin.to(x.dtype)).to(x.dtype)


class WhorlAttention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.eps, self.head_dim = layer, config.rms_norm_eps, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.qkv = nn.Linear(config.hidden_size, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.temperature = nn.Parameter(torch.ones(self.heads, 1))
        self.smear = nn.Parameter(torch.zeros(self.kv_heads, 1)) if config.smear_keys else None

    def forward(self, x, tables, mask, is_token, cache):
        """Return [B, T, hidden]. mask: [B, 1, T, S], True where a query sees a key; is_token: [B, S], False for padding."""
        heads = self.qkv(x).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        if self.smear is not None:
            before = torch.cat([k[:, :, :1], k[:, :, :-1]], dim=2)
            mixed = k + torch.sigmoid(self.smear)[:, None].to(k.dtype) * (before - k)
            follows = F.pad(is_token[:, :-1], (1, 0))  # whether the position before is a token
            k = torch.where(follows[:, None, :, None], mixed, k)
        cos, sin = tables
        q = rms_norm(q, self.temperature[:, None], self.eps)
        q = rotate(q, cos[:, :, -q.shape[2] :], sin[:, :, -q.shape[2] :])
        k = rotate(rms_norm(k, eps=self.eps), cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return self.out(y.transpose(1, 2).flatten(2))


class WhorlMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down(F.relu(self.up(x)).square())


class WhorlLayer(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attention_norm, self.attention = WhorlRMSNorm(config), WhorlAttention(config, layer)
        self.mlp_norm, self.mlp = WhorlRMSNorm(config), WhorlMLP(config)

    def forward(self, x, *rest):
        x = x + self.attention(self.attention_norm(x), *rest)
        return x + self.mlp(self.mlp_norm(x))


class WhorlPreTrainedModel(PreTrainedModel):
    config_class = WhorlConfig
    base_model_prefix = "model"
    _no_split_modules = ["WhorlLayer"]  # noqa: RUF012
    _supports_sdpa = True


class WhorlModel(WhorlPreTrainedModel):
    """The network up to the last norm."""

    def __init__(self, config):
        super().__init__(config)
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.ngrams = nn.ModuleList([nn.Embedding(config.ngram_buckets, width) for _ in config.ngram_orders])
        self.embedding_norm, self.norm = WhorlRMSNorm(config), WhorlRMSNorm(config)
        self.layers = nn.ModuleList([WhorlLayer(config, n) for n in range(config.num_hidden_layers)])
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs
    ):  # fmt: skip
        """Return the hidden states of ids [B, T].

        attention_mask: [B, S] over cached and new positions, 0 for padding. Positions count the tokens before; other
        `position_ids`, as of several documents in one row, are refused.
        """
        if (self.config.use_cache if use_cache is None else use_cache) and past_key_values is None:
            past_key_values = DynamicCache()
        cache, length = past_key_values, input_ids.shape[1]
        total = length + (0 if cache is None else cache.get_seq_length())
        if attention_mask is None:
            is_token = torch.ones(len(input_ids), total, dtype=torch.bool, device=input_ids.device)
        elif attention_mask.shape != (len(input_ids), total):
            raise ValueError(f"attention_mask is {[*attention_mask.shape]}, not {[len(input_ids), total]}")
        else:
            is_token = attention_mask.bool()
        positions = (is_token.long().cumsum(-1) - 1).clamp(min=0)
        if position_ids is not None:
            wrong = (position_ids != positions[:, -length:]) & is_token[:, -length:]
            if wrong.any():
                raise ValueError("position_ids: this model needs one document per row, from position 0")

        ids = torch.where(is_token[:, -length:], input_ids, -1)
        if cache is not None:
            n = self.config.num_hidden_layers
            while len(cache.layers) <= n:
                cache.layers.append(DynamicLayer())
            ids = cache.layers[n].update(*[ids[:, None, :, None]] * 2)[0][:, 0, :, 0]
        x = self.embed_tokens(input_ids)
        orders = self.config.ngram_orders
        rows = ngram_rows(ids, length, orders, self.config.ngram_buckets) if orders else []
        for table, row in zip(self.ngrams, rows, strict=True):
            x = x + table(row)
        x = self.embedding_norm(x)

        index = torch.arange(total, device=ids.device)
        query = index[-length:, None]
        sees_itself = index == query  # padding, too: no row of the mask is empty
        mask = (index <= query) & is_token[:, None, None] | sees_itself
        tables = rotary_tables(self.config, positions)
        for layer in self.layers:
            x = layer(x, tables, mask, is_token, cache)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), past_key_values=cache)


class WhorlForCausalLM(WhorlPreTrainedModel, GenerationMixin):
    """The language model: `WhorlModel` and a head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config):
        super().__init__(config)
        self.model = WhorlModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, labels=None, use_cache=None,
        logits_to_keep=0, **kwargs,
    ):  # fmt: skip
        """Return fp32 logits of ids [B, T], of the last `logits_to_keep` positions if it is not 0, and a loss of labels."""
        output = self.model(input_ids, attention_mask, position_ids, past_key_values, use_cache)
        logits = self.lm_head(output.last_hidden_state[:, -logits_to_keep:]).float()
        if cap := self.config.logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)
