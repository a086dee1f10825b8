"""Small Hugging Face models of every family, for the tests of models/exchange."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from whorl.models.transformer import Transformer
from whorl.models.transformer_config import AttentionConfig, TransformerConfig

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 24}
FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, **FACTORS}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
LATENT = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}  # fmt: skip
# name -> (stem of the Hugging Face classes, fields that differ from SHAPE)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("Llama", {}),
    "llama-3": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral": ("Mistral", {"sliding_window": 6, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "phi3": ("Phi3", {"num_key_value_heads": 2, "sliding_window": 6}),
    "phi4-mini": ("Phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "tie_word_embeddings": False}),
    "smollm3-sliding": ("SmolLM3", {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5}),
    "granite": (
        "Granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.22, "logits_scaling": 0.5},
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", {"attention_bias": True, "rope_parameters": YARN, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 4, "sliding_window_pattern": 3}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
    "olmoe-unnormalized": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "num_key_value_heads": 4}),
    "deepseek": ("DeepseekV3", {**EXPERTS, **LATENT}),
    "deepseek-yarn": ("DeepseekV3", {**EXPERTS, **LATENT, "q_lora_rank": None, "rope_parameters": {**YARN, **MSCALE}}),
}  # fmt: skip


def hf_config(case: str) -> Any:
    stem, fields = CASES[case]
    name = "Gemma3TextConfig" if stem == "Gemma3" else f"{stem}Config"
    base = {"vocab_size": 96} if stem == "GPT2" else SHAPE
    return getattr(transformers, name)(**{**base, **fields})


def hf_model(case: str) -> Any:
    """Return a tiny Hugging Face model with random weights, norms included, so that swapped ones are noticed."""
    stem = CASES[case][0]
    cls = getattr(transformers, "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM")
    torch.manual_seed(0)
    model = cls(hf_config(case)).eval()
    for p in model.parameters():
        p.data = torch.randn_like(p) * 0.2 + (p.data if p.dim() == 1 else 0)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.randn_like(buffer) * 0.3)
    return model


def save_hf_model(case: str, folder: Path, **options: Any) -> Any:
    model = hf_model(case)
    model.save_pretrained(folder, **options)
    return model


# Published config.json files, with the numbers of all parameters and of the active ones in billions.
PUBLISHED = json.loads(Path(__file__).with_name("published_configs.json").read_text())["text"]
IDS = torch.randint(0, 96, (2, 20), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def hf_outputs(model: Any) -> torch.Tensor:
    return model(IDS).logits.float()


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    return model.logits(model(IDS))


def small(**changes: Any) -> Transformer:
    heads = AttentionConfig(n_heads=4, n_kv_heads=2, head_dim=8)
    shape = {"vocab_size": 96, "d_model": 32, "n_layers": 2, "mlp_hidden": 40, "mixers": {"full": heads}}
    return Transformer(TransformerConfig(**(shape | changes)), torch.Generator().manual_seed(0))
