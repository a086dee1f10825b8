"""Models for the native step, and random sequences that compare it with the model's forward."""

from __future__ import annotations

import itertools
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from whorl.engine.cache.kv_int8 import Int8KVPages
from whorl.engine.cache.pages import InputBatch, KVPages
from whorl.engine.cpu import NativeStep
from whorl.engine.model.runner import ModelRunner
from whorl.models import LanguageModel, Transformer
from whorl.models.transformer_config import AttentionConfig, Rope, TransformerConfig
from whorl.nn.attention import multi_head

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "head_dim 64, many rows a head": {"head_dim": 64, "n_heads": 6, "n_kv_heads": 1, "d_model": 100},
    "head_dim 80": {"head_dim": 80, "n_kv_heads": 4, "d_model": 65, "mlp_hidden": 33},
    "head_dim 128": {"head_dim": 128, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64},
    "head_dim 20": {"head_dim": 20, "vocab_size": 65},
    "window": {"window": 9},
    "interleaved, partial": {"rope": Rope(layout="interleaved", rotary_dim=16)},
    "biases": {"bias": True, "out_bias": True, "mlp_bias": True, "mlp": "gelu", "norm": "layer"},
    "sink, softcap": {"sink": True, "softcap": 5.0, "logit_softcap": 3.0, "mlp": "geglu"},
    "smear, norm": {"smear": True, "qk_norm": True, "mlp": "relu2", "norm_offset": 1.0},
    "sandwich": {"sandwich": True, "embedding_scale": 9.8, "mlp": "gelu_tanh"},
    "norms after only": {"sandwich": True, "pre_norm": False},
    "parallel": {"parallel": True, "learned_positions": True, "rope": None, "mlp": "quick_gelu"},
}


# Limits of the log-probability error on random texts: twice the error seen with these seeds. Weights (and, for integers,
# activations) of two layers are rounded; the logits spread by about 3.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.14, "int8": 0.5, "int4": 4.6}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    heads: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    heads.update({k: changes.pop(k) for k in list(changes) if k in AttentionConfig.model_fields})
    shape = {"vocab_size": 211, "d_model": 96, "n_layers": 2, "mlp_hidden": 160, "mlp": "swiglu"}
    config = TransformerConfig(**{**shape, "mixers": {"heads": AttentionConfig(**heads)}, **changes})
    model = Transformer(config, torch.Generator().manual_seed(seed), dtype)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel() + seed))
            p.add_(noise * (0.1 if p.ndim == 1 else p.shape[-1] ** -0.5))
    return model.eval()


class Texts:
    """Sequences of random ids, computed in random chunks, in pages that are NaN elsewhere.

    dtype: of the cache, as of `ModelRunner`.
    """

    def __init__(
        self,
        model: LanguageModel,
        page_size: int,
        lengths: list[int],
        seed: int = 0,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.page_size = model, page_size
        vocab = model.config.vocab_size
        self.ids = [self.rng.integers(0, vocab, n) for n in lengths]
        self.done = [0] * len(lengths)
        per_row = -(-max(lengths) // page_size) + 1
        n_pages = per_row * len(lengths) + 3
        pools = dict.fromkeys((None, *_windows(model)), n_pages)
        self.runner = ModelRunner(model, pools, page_size, len(lengths), 512, dtype=dtype)
        for layer in self.runner.layers:
            assert isinstance(layer, KVPages)
            for t in layer.tensors:
                t.fill_(float("nan") if t.is_floating_point() else 93)
        pages = self.rng.permutation(n_pages)[: per_row * len(lengths)]
        self.pages = pages.reshape(len(lengths), per_row).astype(np.int32)

    def batch(self, most: int, decode_from: int = 512) -> tuple[InputBatch, list[int], list[slice]]:
        """Return the next chunks of up to `most` positions of some rows, short ones first; their rows and positions."""
        left = [r for r in range(len(self.ids)) if self.done[r] < len(self.ids[r])]
        rows = [r for r in left if self.rng.random() < 0.8] or left
        caps = {r: most if self.done[r] < decode_from else 1 for r in rows}
        sizes = {
            r: int(self.rng.integers(1, min(caps[r], len(self.ids[r]) - self.done[r]) + 1)) for r in rows
        }
        rows.sort(key=lambda r: sizes[r] > 1)
        spans = [slice(self.done[r], self.done[r] + sizes[r]) for r in rows]
        for r, s in zip(rows, spans, strict=True):
            self.done[r] = s.stop
        return self.batch_of(rows, spans), rows, spans

    def batch_of(self, rows: list[int], spans: list[slice]) -> InputBatch:
        """One span of positions of each row."""
        sizes = [s.stop - s.start for s in spans]
        ids = np.concatenate([self.ids[r][s] for r, s in zip(rows, spans, strict=True)])
        reach = self.runner.ngram_context
        padded = [np.concatenate([np.full(reach, -1), self.ids[r]]) for r in rows]
        places = [(p, i) for p, s in zip(padded, spans, strict=True) for i in range(s.start, s.stop)]
        before = [p[i : i + reach] for p, i in places]
        return InputBatch(
            ids=torch.from_numpy(ids),
            positions=torch.cat([torch.arange(s.start, s.stop) for s in spans]),
            starts=[0, *np.cumsum(sizes).tolist()],
            lengths=[s.stop for s in spans],
            slots=rows,
            pages=[self.pages[rows] for _ in self.runner.windows],
            logit_indices=torch.arange(len(ids)),
            n_single=sum(1 for _ in itertools.takewhile(lambda n: n == 1, sizes)),
            previous_ids=torch.from_numpy(np.array(before)) if reach else None,
        )

    def compare(self, step: NativeStep, most: int = 40, rounds: int = 40, decode_from: int = 512) -> float:
        """Run all sequences to their end; returns the largest log-probability error against the model's forward.

        The forward reads the keys and values of an int8 cache from the pages, where `step` has written them.

        Args:
            most: positions of a row in a step; one from position `decode_from` on.
        """
        found: list[list[torch.Tensor]] = [[] for _ in self.ids]
        for _ in range(rounds):
            if self.done == [len(ids) for ids in self.ids]:
                break
            batch, rows, spans = self.batch(most, decode_from)
            got = step.run(batch, self.runner.layers, self.runner.group_of).log_softmax(-1)
            assert bool(got.isfinite().all())
            for r, part in zip(rows, got.split([s.stop - s.start for s in spans]), strict=True):
                found[r].append(part)
        rows = [r for r, parts in enumerate(found) if parts]
        return max(float((torch.cat(found[r]) - self._expected(r)).abs().max()) for r in rows)

    @torch.inference_mode()
    def _expected(self, row: int) -> torch.Tensor:
        """Log-probabilities by the model's forward, of the computed positions of a row."""
        layers, own = iter(self.runner.layers), multi_head.attend

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **options: Any
        ) -> torch.Tensor:
            layer = next(layers)
            if isinstance(layer, Int8KVPages):
                pairs = (layer.k, layer.k_scale), (layer.v, layer.v_scale)
                k, v = (self._of_row(codes * scale, row).to(q.dtype) for codes, scale in pairs)
            return own(q, k, v, *rest, **options)

        ids = torch.from_numpy(self.ids[row][: self.done[row]])
        with patch.object(multi_head, "attend", attend):
            return self.model.logits(self.model(ids[None])[0]).log_softmax(-1)

    def _of_row(self, t: torch.Tensor, row: int) -> torch.Tensor:
        """Pages [n_pages, KV, page_size, d] -> [1, KV, positions, d] of a row."""
        return t[self.pages[row]].transpose(0, 1).flatten(1, 2)[None, :, : self.done[row]]


def _windows(model: LanguageModel) -> list[int]:
    if not isinstance(model, Transformer):
        return []
    mixers = [m for m in model.config.layer_mixers() if isinstance(m, AttentionConfig)]
    return [m.window for m in mixers if m.window is not None]
