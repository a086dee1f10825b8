"""Models saved before fields were renamed load with today's code.

`configs_before_renames.json` holds the config.json objects that commit fa42690 wrote.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.models.former_decoder import former_fields, former_tensors

from whorl.models import LanguageModel, TransformerConfig, load_model, make_model, save_model, whorl_decoder
from whorl.models.encoder import EncoderConfig
from whorl.models.exchange import import_model
from whorl.models.legacy_config import upgrade_transformer
from whorl.models.lora import init_lora, load_lora, save_lora
from whorl.models.quantization.gptq import quantize_model
from whorl.models.quantization.weights import QuantizationConfig
from whorl.models.serialization import read_config
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MLAConfig, MoEConfig, Rope
from whorl.nn.positions.rotary import RopeScaling

FILE = Path(__file__).parents[1] / "support/models/configs_before_renames.json"
OLD: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
INT4 = QuantizationConfig(format="int4", group_size=8, head=True, ngram=True)
SMALL: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "mlp_hidden": 32}
DECODER = whorl_decoder(**SMALL, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, ngram_buckets=8)
HEADS = AttentionConfig(n_heads=2, n_kv_heads=2, head_dim=8)
SHARED = TransformerConfig(**SMALL, n_layers=2, kv_sharing_factor=2, mixers={"a": HEADS})
YARN = Rope(scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.25))
LATENT = MLAConfig(n_heads=2, kv_rank=8, nope_dim=4, rope_dim=4, v_dim=8, rope=YARN)
GRU = CustomMixer(kind="gru", options={"backend": "loop"})
EXPERTS = MoEConfig(n_experts=4, top_k=2, hidden=8, norm_topk_prob=False)
MIXED = TransformerConfig(**SMALL, n_layers=2, mixers={"a": LATENT, "b": GRU}, experts=EXPERTS)
CONFIGS = {"decoder": DECODER, "mixed": MIXED, "shared": SHARED}


def save_as_before(name: str, folder: Path) -> LanguageModel:
    """Save a model of the kind `name` with the config.json of commit fa42690; return the model."""
    model = make_model(CONFIGS[name.removeprefix("quantized ")], torch.Generator().manual_seed(0))
    if name.startswith("quantized"):
        quantize_model(model, INT4)
    save_model(model, folder)
    (folder / "config.json").write_text(json.dumps(OLD[name]))
    if name.endswith("decoder"):
        save_file(former_tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    return model


@pytest.mark.parametrize("name", [name for name in OLD if name != "encoder"])
def test_load_model_reads_renamed_config_keys(name: str, tmp_path: Path) -> None:
    model = save_as_before(name, tmp_path / "model")
    loaded = load_model(tmp_path / "model")
    assert loaded.config == read_config(tmp_path / "model") == model.config
    assert loaded.quantization == (INT4 if name.startswith("quantized") else None)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    ids = torch.arange(6)[None]
    assert torch.equal(loaded(ids), model.eval()(ids))


def test_former_decoder_shape_keeps_every_field() -> None:
    fields = {"rope_base": 5e3, "mlp": "swiglu", "tie_embeddings": True, "trained_length": 32}
    former = OLD["decoder"] | fields | {"smear_keys": False, "ngram_orders": [], "ngram_buckets": 65_536}
    config = TransformerConfig.model_validate(upgrade_transformer(former))
    assert former_fields(config) == former
    assert (
        former_fields(TransformerConfig.model_validate(upgrade_transformer(OLD["decoder"]))) == OLD["decoder"]
    )


def test_adapters_of_the_former_decoder_load(tmp_path: Path) -> None:
    model = make_model(DECODER, torch.Generator().manual_seed(0))
    lora = init_lora(model, 2, 2.0, generator=torch.Generator().manual_seed(1))
    save_lora(lora, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    save_file(former_tensors(load_file(file)), file)
    assert load_lora(tmp_path, model).factors.keys() == lora.factors.keys()


def test_import_model_reads_renamed_config_keys(tmp_path: Path) -> None:
    save_as_before("mixed", tmp_path / "model")
    config = import_model(tmp_path / "model").config
    assert config.mixers == {"a": LATENT, "b": GRU} and config.experts == EXPERTS


def test_encoder_config_reads_unchanged_keys() -> None:
    config = EncoderConfig.model_validate(OLD["encoder"])
    assert config.model_dump(mode="json") == OLD["encoder"]
