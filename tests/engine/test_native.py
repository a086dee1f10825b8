"""The native step against the model's own forward: every kind of weight, every thing a dense decoder may have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from whorl.engine.native import NativeStep, build, layout, supports
from whorl.engine.pages import Batch, HeadPages
from whorl.engine.runner import Runner
from whorl.errors import ConfigError
from whorl.models import Decoder, LanguageModel, Transformer
from whorl.models.transformer_config import Heads, Rope, TransformerConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent))
from test_parity import decoder
from test_transformer import KINDS, made

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C++ compiler here")

NATIVE = {
    **{kind: (lambda kind=kind: made(**KINDS[kind]).eval()) for kind in KINDS},
    "decoder": decoder,
    "decoder without memory": lambda: decoder(ngram_orders=(), smear_keys=False, tie_embeddings=True),
}
NATIVE = {name: make for name, make in NATIVE.items() if supports(make()) is None}


def llama(seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Transformer:
    heads: dict[str, Any] = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 32}
    heads.update({k: changes.pop(k) for k in list(changes) if k in Heads.model_fields})
    shape = {"vocab_size": 211, "d_model": 96, "n_layers": 2, "mlp_hidden": 160, "mlp": "swiglu"}
    config = TransformerConfig(**{**shape, "mixers": {"heads": Heads(**heads)}, **changes})
    model = Transformer(config, torch.Generator().manual_seed(seed), dtype)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel() + seed))
            p.add_(noise * (0.1 if p.ndim == 1 else p.shape[-1] ** -0.5))
    return model.eval()


class Texts:
    """Rows of random ids that are read in by random pieces, in pages of which only their own are not NaN."""

    def __init__(self, model: LanguageModel, page_size: int, lengths: list[int], seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.page_size = model, page_size
        vocab = model.config.vocab_size
        self.ids = [self.rng.integers(0, vocab, n) for n in lengths]
        self.done = [0] * len(lengths)
        per_row = -(-max(lengths) // page_size) + 1
        n_pages = per_row * len(lengths) + 3
        self.runner = Runner(model, {w: n_pages for w in (None, *_windows(model))}, page_size, len(lengths), 512)
        for layer in self.runner.layers:
            assert isinstance(layer, HeadPages)
            for t in layer.tensors:
                t.fill_(float("nan"))
        pages = self.rng.permutation(n_pages)[: per_row * len(lengths)]
        self.pages = pages.reshape(len(lengths), per_row).astype(np.int32)

    def batch(self, most: int) -> tuple[Batch, list[int], list[slice]]:
        """The next pieces of up to `most` positions of some rows, short ones first; the rows, their positions."""
        left = [r for r in range(len(self.ids)) if self.done[r] < len(self.ids[r])]
        rows = [r for r in left if self.rng.random() < 0.8] or left
        sizes = {r: int(self.rng.integers(1, min(most, len(self.ids[r]) - self.done[r]) + 1)) for r in rows}
        rows.sort(key=lambda r: sizes[r] > 1)
        spans = [slice(self.done[r], self.done[r] + sizes[r]) for r in rows]
        ids = np.concatenate([self.ids[r][s] for r, s in zip(rows, spans, strict=True)])
        starts = [0, *np.cumsum([sizes[r] for r in rows]).tolist()]
        reach = self.runner.reach
        padded = [np.concatenate([np.full(reach, -1), self.ids[r]]) for r in rows]
        before = [p[i : i + reach] for p, s in zip(padded, spans, strict=True) for i in range(s.start, s.stop)]
        for r, s in zip(rows, spans, strict=True):
            self.done[r] = s.stop
        batch = Batch(
            ids=torch.from_numpy(ids),
            positions=torch.cat([torch.arange(s.start, s.stop) for s in spans]),
            starts=starts,
            lengths=[s.stop for s in spans],
            slots=rows,
            pages=[self.pages[rows] for _ in self.runner.windows],
            wanted=torch.arange(len(ids)),
            n_single=sum(n == 1 for n in sizes.values()),
            before=torch.from_numpy(np.array(before)) if reach else None,
        )
        return batch, rows, spans

    def compare(self, step: NativeStep, most: int = 40, rounds: int = 40) -> float:
        """Runs all to their end; -> the largest difference of a log-probability from the model's own forward."""
        with torch.inference_mode():
            want = [
                self.model.logits(self.model(torch.from_numpy(ids)[None])[0]).log_softmax(-1) for ids in self.ids
            ]
        worst = 0.0
        for _ in range(rounds):
            if all(d == len(ids) for d, ids in zip(self.done, self.ids, strict=True)):
                break
            batch, rows, spans = self.batch(most)
            got = step.run(batch, self.runner.layers, self.runner.group_of).log_softmax(-1)
            expected = torch.cat([want[r][s] for r, s in zip(rows, spans, strict=True)])
            assert bool(got.isfinite().all())
            worst = max(worst, float((got - expected).abs().max()))
        return worst


def _windows(model: LanguageModel) -> list[int]:
    if not isinstance(model, Transformer):
        return []
    return [m.window for m in model.config.layer_mixers() if isinstance(m, Heads) and m.window is not None]


@pytest.mark.parametrize("family", NATIVE)
def test_every_family_says_what_its_forward_says(family: str) -> None:
    model = NATIVE[family]()
    texts = Texts(model, 4, [1, 2, 7, 23, 41])
    assert texts.compare(NativeStep(model, 4, threads=2), most=12) < 1e-4


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
    "parallel": {"parallel": True, "learned_positions": True, "rope": None, "mlp": "quick_gelu"},
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("page_size", [16, 32])
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape: str, page_size: int, threads: int) -> None:
    model = llama(**SHAPES[shape])
    texts = Texts(model, page_size, [1, 3, 33, 100, 70], seed=threads)
    assert texts.compare(NativeStep(model, page_size, threads=threads), most=60) < 1e-4
