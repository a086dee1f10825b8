"""LoRA adapters: a mixed batch equals merged models; PEFT folders load; errors name the tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support.engine import parity
from tests.support.models.transformer_shapes import made
from torch import Tensor

from whorl.engine.engine import Engine
from whorl.engine.model.multi_lora import Adapters, LoRAMapping, lora_delta, lora_delta_reference
from whorl.errors import CheckpointError, ConfigError
from whorl.models import LanguageModel, Transformer
from whorl.models.compression.gptq import quantize_model
from whorl.models.compression.quantize import QuantizationConfig
from whorl.models.lora import LoRA, LoRAFactors, init_lora, load_lora, merge_lora, save_lora, target_modules
from whorl.models.transformer_config import AttentionConfig


def decoder() -> Transformer:
    return parity.decoder(vocab_size=48, n_heads=2, n_kv_heads=1, head_dim=16, mlp_hidden=64)


def llama() -> Transformer:
    heads = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=16)
    return made(vocab_size=48, n_layers=2, mixers={"a": heads}).eval()


def lora(model: LanguageModel, seed: int, rank: int = 4, layers: tuple[str, ...] = ()) -> LoRA:
    """An adapter with random factors, so that it changes the output."""
    g = torch.Generator().manual_seed(seed)
    fresh = init_lora(model, rank, 2.0 * rank, layers, g).factors
    b = {name: torch.randn(p.b.shape, generator=g) * 0.1 for name, p in fresh.items()}
    return LoRA({name: LoRAFactors(p.a, b[name], p.scale) for name, p in fresh.items()})


def adapters_of(model: LanguageModel, **loras: LoRA) -> Adapters:
    adapters = Adapters(model)
    for name, one in loras.items():
        adapters.add(name, one)
    return adapters


def merged(model: LanguageModel, one: LoRA) -> LanguageModel:
    merge_lora(model, one)
    return model


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(48, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits_of(model: LanguageModel, text: Tensor) -> Tensor:
    return model.logits(model(text))


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24), st.integers(0, 9))
def test_lora_delta_matches_reference(adapter_indices: list[int], seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, a, b = (torch.randn(shape, generator=g) for shape in ((len(adapter_indices), 6), (4, 3, 6), (4, 5, 3)))
    mapping = LoRAMapping(adapter_indices)
    if not mapping.active_indices:
        assert not any(adapter_indices)
        return
    chosen = torch.tensor(mapping.active_indices) - 1
    found = torch.zeros(len(adapter_indices), 5)
    delta = lora_delta(x, a[chosen], b[chosen], mapping)
    found = delta if mapping.strategy == "all" else found.index_add(0, mapping.adapted_rows, delta)
    assert torch.allclose(found, lora_delta_reference(x, a, b, adapter_indices), atol=1e-5)


@pytest.mark.parametrize(
    ("adapter_indices", "strategy"),
    [([2, 2, 2], "all"), ([2, 2, 0], "padded"), ([1, 2, 3, 1], "padded"), ([1] * 20 + [2, 3, 4], "segments")],
)
def test_lora_mapping_selects_strategy(adapter_indices: list[int], strategy: str) -> None:
    assert LoRAMapping(adapter_indices).strategy == strategy


@pytest.mark.parametrize("kind", [decoder, llama])
def test_mixed_batch_matches_merged_models(kind: Any) -> None:
    model, text = kind(), ids(5, 7)
    loras = {"a": lora(model, 1), "b": lora(model, 2, 7, ("out", "down")), "c": lora(model, 3, 1, ("up",))}
    adapters, plain = adapters_of(model, **loras), logits_of(model, text)
    alone = {name: logits_of(merged(kind(), one), text) for name, one in loras.items()}
    for names in (["a", "b", None, "c", "a"], ["b"] * 5, [None, None, "c", None, None]):
        indices = adapters.expand_to_positions(adapters.indices_of(names) or [], [0, 7, 14, 21, 28, 35])
        with adapters.active(indices):
            together = logits_of(model, text)
        for row, name in enumerate(names):
            want = alone.get(name, plain)[row]
            assert torch.allclose(together[row], want, atol=1e-5, rtol=1e-5)
            assert name is None or (together[row] - plain[row]).abs().max() > 0.01
    assert torch.equal(logits_of(model, text), plain)


def test_active_removes_hooks_after_error() -> None:
    model = decoder()
    adapters = adapters_of(model, a=lora(model, 1))
    with adapters.active([0, 0]):
        assert not any(m._forward_hooks for m in model.modules())
    with pytest.raises(ConfigError, match=r"receives 6 positions.* has 5"), adapters.active([1] * 5):
        logits_of(model, ids(2, 3))
    assert not any(m._forward_hooks for m in model.modules())


def test_adapter_indices_are_reused_and_cache_keys_not() -> None:
    model = decoder()
    adapters = Adapters(model)
    assert [adapters.add(name, lora(model, n)) for n, name in enumerate("ab")] == [1, 2]
    key, text = adapters.cache_key("a"), ids(1, 4)
    with adapters.active([1] * 4):
        first = logits_of(model, text)
    adapters.remove("a")
    assert "a" not in adapters and adapters.names == ["b"]
    with pytest.raises(ConfigError, match="adapter 'a' is not loaded"):
        adapters.index_of("a")
    with pytest.raises(ConfigError, match="adapter 1 is not loaded"), adapters.active([1]):
        pass
    assert adapters.add("a", lora(model, 7)) == 1
    assert adapters.cache_key("a") != key and adapters.cache_key(None) == ""
    with adapters.active([1] * 4):
        assert (logits_of(model, text) - first).abs().max() > 0.01
    with pytest.raises(ConfigError, match="name is 'b'"):
        adapters.add("b", lora(model, 1))


def test_adapter_on_quantized_model() -> None:
    text, want = ids(2, 6), decoder()
    quantized, one = quantize_model(decoder(), QuantizationConfig()), lora(want, 1)
    for name, part in one.factors.items():
        weight = quantized.get_submodule(name).weight
        want.get_submodule(name).weight.data = weight + part.delta  # type: ignore[union-attr,operator]
    with adapters_of(quantized, a=one).active([1] * 12):
        assert torch.allclose(logits_of(quantized, text), logits_of(want, text), atol=1e-4)
    with pytest.raises(ConfigError, match="quantized: an adapter cannot be merged"):
        merge_lora(quantized, one)


def test_saved_lora_loads_with_ranks_and_scales(tmp_path: Path) -> None:
    model = decoder()
    parts = dict(lora(model, 1, 4, ("qkv",)).factors) | dict(lora(model, 2, 2, ("down",)).factors)
    odd = "blocks.1.mlp.down"
    parts[odd] = LoRAFactors(parts[odd].a, parts[odd].b, 0.3)
    save_lora(LoRA(parts), tmp_path, "mine")
    found = load_lora(tmp_path, model)
    assert found.factors.keys() == parts.keys() and found.rank == 4
    for name, part in parts.items():
        assert torch.equal(found.factors[name].a, part.a) and torch.equal(found.factors[name].b, part.b)
        assert found.factors[name].scale == pytest.approx(part.scale)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "mine"
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.blocks.0.mixer.qkv.lora_A.weight" in stored
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    assert load_lora(tmp_path, model).factors["blocks.0.mixer.qkv"].scale == pytest.approx(8 / 2)


def test_load_lora_maps_hugging_face_layer_names(tmp_path: Path) -> None:
    model, g = llama(), torch.Generator().manual_seed(0)
    attention = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32)}
    sizes = {**attention, "mlp.up_proj": (40, 32), "mlp.gate_proj": (40, 32), "mlp.down_proj": (32, 40)}
    places = [(layer, name) for layer in (0, 1) for name in sizes if (layer, name) != (1, "mlp.gate_proj")]
    tensors, deltas = {}, {}
    for layer, name in places:
        d_out, d_in = sizes[name]
        a, b = torch.randn(3, d_in, generator=g), torch.randn(d_out, 3, generator=g)
        path = f"base_model.model.model.layers.{layer}.{name}"
        tensors |= {f"{path}.lora_A.weight": a, f"{path}.lora_B.weight": b}
        deltas[layer, name] = 2.0 * b @ a
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6}))
    found = load_lora(tmp_path, model)
    assert torch.allclose(found.factors["blocks.1.mixer.k"].delta, deltas[1, "self_attn.k_proj"], atol=1e-5)
    whole = torch.cat([deltas[0, "mlp.gate_proj"], deltas[0, "mlp.up_proj"]])  # gate above up
    assert torch.allclose(found.factors["blocks.0.mlp.up"].delta, whole, atol=1e-4)
    half = torch.cat([torch.zeros(40, 32), deltas[1, "mlp.up_proj"]])
    assert torch.allclose(found.factors["blocks.1.mlp.up"].delta, half, atol=1e-4)


def test_load_lora_rejects_misfits(tmp_path: Path) -> None:
    weights, config = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    model = decoder()
    save_lora(lora(model, 1, 4, ("qkv", "down")), tmp_path)
    good, settings = load_file(weights), json.loads(config.read_text())
    a = "base_model.model.blocks.1.mlp.down.lora_A.weight"
    b = a.replace("lora_A", "lora_B")

    def error_of(tensors: dict[str, Tensor], **fields: Any) -> str:
        save_file(tensors, weights)
        config.write_text(json.dumps(settings | fields))
        with pytest.raises(ConfigError) as error:
            load_lora(tmp_path, model)
        return str(error.value)

    assert f"tensor {a} has the shape [4, 63]" in error_of(good | {a: torch.zeros(4, 63)})
    assert f"tensor {b} has the shape [31, 4]" in error_of(good | {b: torch.zeros(31, 4)})
    assert "of one rank" in error_of(good | {b: torch.zeros(32, 5)})
    assert f"{b} is missing" in error_of({k: v for k, v in good.items() if k != b})
    assert "is unknown" in error_of(good | {"base_model.model.head.weight": torch.zeros(3)})
    assert "'blocks.7.mlp.down'" in error_of({k.replace("1.mlp", "7.mlp"): v for k, v in good.items()})
    assert f"tensor {a} is not finite" in error_of(good | {a: torch.full((4, 64), float("nan"))})
    assert f"tensor {a} has 4 rows" in error_of(good, rank_pattern={"blocks.1.mlp.down": 8})
    assert "use_dora is True" in error_of(good, use_dora=True)
    assert "modules_to_save" in error_of(good, modules_to_save=["head"])
    assert "bias is False" in error_of(good, bias=False)  # "none" is the default
    assert "modules_to_save is False" in error_of(good, modules_to_save=False)
    assert "peft_type is 'IA3'" in error_of(good, peft_type="IA3")
    config.write_text(json.dumps(settings))
    weights.write_bytes(b"not safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_lora(tmp_path, model)
    with pytest.raises(ConfigError, match="no layer name ends with"):
        init_lora(model, 4, 8.0, ["qkw"])
    with pytest.raises(ConfigError, match="rank is 0"):
        init_lora(model, 0, 8.0)


def test_init_lora_covers_all_layers_and_is_identity() -> None:
    model = llama()
    fresh = init_lora(model, 4, 8.0)
    assert set(fresh.factors) == set(target_modules(model)) and len(fresh.factors) == 2 * 6
    before = logits_of(model, ids(1, 5))
    merge_lora(model, fresh)
    assert torch.equal(logits_of(model, ids(1, 5)), before)


def test_engine_serves_each_request_with_its_adapter() -> None:
    model = decoder()
    loras = {"a": lora(model, 1), "b": lora(model, 2)}
    adapters = adapters_of(model, **loras)
    engine = Engine(model, parity.config(max_num_batched_tokens=12), adapters=adapters)
    # One prompt for all: pages must not be shared between adapters.
    prompt = ids(1, 17, seed=3)[0].tolist()
    models = {None: decoder(), **{name: merged(decoder(), one) for name, one in loras.items()}}
    for turn in range(2):  # the second turn finds cached prefixes
        for name in models:
            engine.add(parity.request(f"{name} {turn}", prompt, max_tokens=8, adapter=name))
        found: dict[str, list[int]] = {}
        while engine.busy:
            if "a" in [s.request.adapter for s in engine.sequences()]:
                with pytest.raises(ConfigError, match="adapter 'a' is in use"):
                    adapters.remove("a")
            for delta in engine.step():
                found.setdefault(delta.request_id, []).extend(t.id for t in delta.tokens)
            engine.check_integrity()
        for name, alone in models.items():
            text = list(prompt)
            for _ in range(8):
                text.append(int(logits_of(alone, torch.tensor([text]))[0, -1].argmax()))
            assert found[f"{name} {turn}"] == text[17:]
    with pytest.raises(ConfigError, match="adapter 'c' is not loaded"):
        engine.add(parity.request("x", prompt, adapter="c"))
