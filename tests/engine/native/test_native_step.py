"""The native step against the model's own forward: every kind of weight, every thing a dense decoder may have."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from whorl.engine.cache.pages import InputBatch, KVPages
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.model.runner import ModelRunner
from whorl.engine.native import NativeStep, build, unsupported_reason
from whorl.engine.native.runner import NativeRunner, autotune, make_runner
from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.models import LanguageModel, Transformer
from whorl.models.transformer_config import AttentionConfig, Rope, TransformerConfig

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
sys.path.insert(0, str(Path(__file__).parent))
from test_transformer import KINDS, made
from tests.engine.test_engine_parity import PROMPTS, check, decoder, run

pytestmark = pytest.mark.skipif(build.library() is None, reason="there is no C++ compiler here")

NATIVE = {
    **{kind: (lambda kind=kind: made(**KINDS[kind]).eval()) for kind in KINDS},
    "decoder": decoder,
    "decoder without memory": lambda: decoder(ngram_orders=(), smear_keys=False, tie_embeddings=True),
}
NATIVE = {name: make for name, make in NATIVE.items() if unsupported_reason(make()) is None}


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
    """Rows of random ids that are read in by random pieces, in pages of which only their own are not NaN."""

    def __init__(self, model: LanguageModel, page_size: int, lengths: list[int], seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.model, self.page_size = model, page_size
        vocab = model.config.vocab_size
        self.ids = [self.rng.integers(0, vocab, n) for n in lengths]
        self.done = [0] * len(lengths)
        per_row = -(-max(lengths) // page_size) + 1
        n_pages = per_row * len(lengths) + 3
        self.runner = ModelRunner(
            model, dict.fromkeys((None, *_windows(model)), n_pages), page_size, len(lengths), 512
        )
        for layer in self.runner.layers:
            assert isinstance(layer, KVPages)
            for t in layer.tensors:
                t.fill_(float("nan"))
        pages = self.rng.permutation(n_pages)[: per_row * len(lengths)]
        self.pages = pages.reshape(len(lengths), per_row).astype(np.int32)

    def batch(self, most: int) -> tuple[InputBatch, list[int], list[slice]]:
        """The next pieces of up to `most` positions of some rows, short ones first; the rows, their positions."""
        left = [r for r in range(len(self.ids)) if self.done[r] < len(self.ids[r])]
        rows = [r for r in left if self.rng.random() < 0.8] or left
        sizes = {r: int(self.rng.integers(1, min(most, len(self.ids[r]) - self.done[r]) + 1)) for r in rows}
        rows.sort(key=lambda r: sizes[r] > 1)
        spans = [slice(self.done[r], self.done[r] + sizes[r]) for r in rows]
        ids = np.concatenate([self.ids[r][s] for r, s in zip(rows, spans, strict=True)])
        starts = [0, *np.cumsum([sizes[r] for r in rows]).tolist()]
        reach = self.runner.ngram_context
        padded = [np.concatenate([np.full(reach, -1), self.ids[r]]) for r in rows]
        before = [
            p[i : i + reach] for p, s in zip(padded, spans, strict=True) for i in range(s.start, s.stop)
        ]
        for r, s in zip(rows, spans, strict=True):
            self.done[r] = s.stop
        batch = InputBatch(
            ids=torch.from_numpy(ids),
            positions=torch.cat([torch.arange(s.start, s.stop) for s in spans]),
            starts=starts,
            lengths=[s.stop for s in spans],
            slots=rows,
            pages=[self.pages[rows] for _ in self.runner.windows],
            logit_indices=torch.arange(len(ids)),
            n_single=sum(n == 1 for n in sizes.values()),
            previous_ids=torch.from_numpy(np.array(before)) if reach else None,
        )
        return batch, rows, spans

    def compare(self, step: NativeStep, most: int = 40, rounds: int = 40) -> float:
        """Runs all to their end; -> the largest difference of a log-probability from the model's own forward."""
        with torch.inference_mode():
            want = [
                self.model.logits(self.model(torch.from_numpy(ids)[None])[0]).log_softmax(-1)
                for ids in self.ids
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
    return [
        m.window
        for m in model.config.layer_mixers()
        if isinstance(m, AttentionConfig) and m.window is not None
    ]


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


# Largest difference of a log-probability over random texts, seen with these seeds and doubled: rounding weights (and, for
# integers, activations) of two layers whose logits spread by about 3.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.14, "int8": 0.5, "int4": 4.6}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("d_model", [65, 128])
def test_every_kind_of_weight(kind: str, d_model: int) -> None:
    model = llama(d_model=d_model, bias=True)
    step = NativeStep(model, 16, weight_dtype=kind)
    worst = Texts(model, 16, [1, 5, 40, 64]).compare(step, most=30)
    assert (0 if kind == "float32" else 1e-4) < worst < BOUNDS[kind]


@pytest.mark.parametrize("group", [32, 64])
def test_groups(group: int) -> None:
    model = llama()
    for kind in ("int8", "int4"):
        step = NativeStep(model, 16, weight_dtype=kind, weight_group_size=group)
        assert Texts(model, 16, [5, 40]).compare(step, most=30) < BOUNDS[kind]


def test_a_bf16_model_with_a_bf16_cache_is_within_its_own_rounding() -> None:
    exact, rounded = llama(), llama(dtype=torch.bfloat16)
    texts = Texts(rounded, 16, [3, 40, 64])
    ids = torch.from_numpy(texts.ids[1])[None]
    with torch.inference_mode():
        a, b = (m.logits(m(ids)).log_softmax(-1) for m in (exact, rounded))
        noise = float((a - b).abs().max())  # of torch's own bf16 forward
    assert texts.runner.layers[0].tensors[0].dtype == torch.bfloat16
    assert 1e-3 < texts.compare(NativeStep(rounded, 16), most=30) < 2 * noise


def test_a_row_does_not_depend_on_its_company_to_the_bit() -> None:
    model = llama()
    for kind in ("float32", "bfloat16", "int8", "int4"):
        step = NativeStep(model, 16, weight_dtype=kind, threads=2)
        found = []
        for lengths in ([37], [37, 1, 50, 9, 9, 9, 9, 9]):
            texts = Texts(model, 16, lengths)
            texts.ids[0] = np.arange(37) % 211
            n = len(lengths)
            batch = InputBatch(
                ids=torch.from_numpy(np.concatenate(texts.ids)),
                positions=torch.cat([torch.arange(k) for k in lengths]),
                starts=[0, *np.cumsum(lengths).tolist()],
                lengths=lengths,
                slots=list(range(n)),
                pages=[texts.pages],
                logit_indices=torch.arange(sum(lengths)),
                n_single=0,
            )
            found.append(step.run(batch, texts.runner.layers, texts.runner.group_of)[:37])
        assert torch.equal(*found)


def test_new_weights_are_packed_anew() -> None:
    model, other = llama(), llama(seed=1)
    step = NativeStep(model, 16)
    model.load_state_dict(other.state_dict())
    assert Texts(model, 16, [20]).compare(step) > 0.1
    step.refresh()
    assert Texts(model, 16, [20]).compare(step) < 1e-4


def test_hidden_states_and_the_head_alone() -> None:
    model = llama(logit_softcap=3.0)
    texts = Texts(model, 16, [20])
    batch, _, _ = texts.batch(20)
    step, hidden = NativeStep(model, 16), torch.empty(len(batch.ids), 96)
    logits = step.run(batch, texts.runner.layers, texts.runner.group_of, hidden)
    with torch.inference_mode():
        torch.testing.assert_close(hidden, model(batch.ids[None])[0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(step.logits(hidden), logits)


def test_what_is_not_there_is_refused_before_anything_is_written() -> None:
    model = llama()
    texts, step = Texts(model, 16, [20]), NativeStep(model, 16)
    batch, _, _ = texts.batch(20)
    layers, groups = texts.runner.layers, texts.runner.group_of
    batch.ids[0] = 211
    with pytest.raises(ConfigError, match="vocabulary"):
        step.run(batch, layers, groups)
    batch.ids[0] = 0
    batch.pages[0] = np.full_like(batch.pages[0], 99)
    with pytest.raises(ConfigError, match="page table"):
        step.run(batch, layers, groups)
    batch.pages[0] = batch.pages[0][:, :0]
    with pytest.raises(ConfigError, match="page table"):
        step.run(batch, layers, groups)
    assert bool(layers[0].tensors[0].isnan().all())


def test_what_it_cannot_run_it_says() -> None:
    reasons = {name: unsupported_reason(made(**KINDS[name])) for name in KINDS if name not in NATIVE}
    assert reasons["alibi"] == "attention with alibi" and reasons["post"] and reasons["latent"]
    assert all(reasons.values())
    with pytest.raises(ConfigError, match="mixture"):
        NativeStep(made(**KINDS["experts"]), 16)
    with pytest.raises(ConfigError, match="group is 12"):
        NativeStep(llama(), 16, weight_dtype="int4", weight_group_size=12)
    with pytest.raises(ConfigError, match="bfloat16"):
        NativeStep(llama(), 16, weight_dtype="bf16")


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("family", NATIVE)
def test_the_engine_by_the_native_step(family: str, preemption: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHORL_NATIVE", "1")
    model = NATIVE[family]()
    config = EngineConfig(
        block_size=4,
        max_num_seqs=6,
        max_model_len=60,
        kv_cache_tokens=60,
        max_num_batched_tokens=7,
        preemption=preemption,
    )
    engine = Engine(model, config)
    assert isinstance(engine.runner, NativeRunner) and engine.runner.use_native
    asked = [
        Request(id=str(n), ids=tuple(p), sampling=SamplingParams(temperature=0), max_tokens=20)
        for n, p in enumerate(PROMPTS)
    ]
    check(model, asked, run(engine, asked))
    assert engine.stats.n_preemptions > 0 or family == "gemma"  # whose windows need few pages
    model.load_state_dict({k: v * 1.1 for k, v in model.state_dict().items()})
    engine.update_weights({}, version=1)
    again = [r.model_copy(update={"id": f"again {r.id}"}) for r in asked]
    check(model, again, run(engine, again))
    monkeypatch.setenv("WHORL_NATIVE", "0")
    assert type(Engine(model, config).runner) is ModelRunner


def test_what_is_measured_decides() -> None:
    runner = make_runner(llama(), {None: 4}, 16, 2, 64)
    assert isinstance(runner, NativeRunner)
    seconds = autotune(runner)
    assert runner.use_native == (min(seconds, key=lambda k: seconds[k]) != "torch")
    assert f"native, {runner.native_step.threads} threads" in seconds
    assert "torch" not in autotune(runner, native_only=True)


def test_replaced_products_and_hooks_go_by_torch_over_the_same_pages() -> None:
    model = llama()
    runner = NativeRunner(model, {None: 4}, 16, 2, 64)
    ids = torch.arange(9)

    def step(a: int, b: int) -> torch.Tensor:
        pages = [np.arange(4, dtype=np.int32)[None]]
        return runner.run(
            InputBatch(ids[a:b], torch.arange(a, b), [0, b - a], [b], [0], pages, torch.arange(b - a), 0)
        )

    first = step(0, 4)
    hook = model.blocks[0].mlp.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    up = model.blocks[0].mlp.up.register_forward_hook(lambda *_: None)  # type: ignore[union-attr]
    assert runner._needs_torch()
    second = step(4, 7)
    hook.remove()
    up.remove()
    assert not runner._needs_torch()
    got = torch.cat([first, second, step(7, 9)])
    with torch.inference_mode():
        torch.testing.assert_close(got, model.logits(model(ids[None]))[0], atol=1e-4, rtol=1e-4)
