"""GGUF export of models, checked with the reader of `transformers` and with llama.cpp where it is installed."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models.gguf_files import FIELDS, field, gguf, llama_cpp

from whorl.errors import ConfigError
from whorl.models import Transformer, TransformerConfig
from whorl.models.exchange.gguf_file import export_gguf
from whorl.models.transformer_config import AttentionConfig, CustomMixer, MLAConfig, MoEConfig, Rope
from whorl.nn.rotary import RopeScaling, rotary_frequencies

SHAPE: dict[str, Any] = {"vocab_size": 96, "d_model": 32, "n_layers": 2, "max_length": 64, "mlp_hidden": 48}
IDS = torch.randint(0, 96, (1, 24), generator=torch.Generator().manual_seed(1))


def heads(**fields: Any) -> AttentionConfig:
    return AttentionConfig(**{"n_heads": 4, "n_kv_heads": 2, "head_dim": 8, **fields})


def shaped(mixer: Any, **fields: Any) -> TransformerConfig:
    mixers = mixer if isinstance(mixer, dict) else {"full": mixer}
    return TransformerConfig(**{**SHAPE, "mixers": mixers, **fields})


def gemma(pattern: str, both: Any, full: Any = None, local: Any = None, **fields: Any) -> TransformerConfig:
    """Layers of full (f) and local (l) attention. both, full, local: fields of the mixers."""
    names = tuple("full" if p == "f" else "local" for p in pattern)
    mixers = {"full": heads(**both, **(full or {})), "local": heads(**both, window=6, **(local or {}))}
    shape = {"mlp": "geglu", "norm_offset": 1.0, "embedding_scale": 32**0.5, "tie_embeddings": True}
    return shaped(mixers, pattern=names, n_layers=len(names), sandwich=True, **shape, **fields)


LATENT = MLAConfig(
    n_heads=4, kv_rank=16, q_rank=12, nope_dim=12, rope_dim=8, v_dim=10, rope=Rope(layout="interleaved")
)
SIGMOIDS = MoEConfig(
    n_experts=8, top_k=2, hidden=24, shared_hidden=48, scoring="sigmoid", scale=2.5, bias_balance=True, groups=(4, 2),
    dense_layers=(0,),
)  # fmt: skip
EXPERTS: dict[str, Any] = {"n_experts": 4, "top_k": 2, "hidden": 24}
SHARED: dict[str, Any] = {**EXPERTS, "shared_hidden": 40, "shared_gate": True, "norm_topk_prob": False}
YARN, FAR = RopeScaling("yarn", 4.0, 16), Rope(base=1e6, scaling=RopeScaling("linear", 8.0))
# DeepSeek with both mscale 1: the gain is in the scale, none in the tables
NO_GAIN = Rope(layout="interleaved", scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.0))
LATENT_SCALE = 20**-0.5 * (0.1 * np.log(4.0) + 1) ** 2
LATENT_YARN = LATENT.model_copy(update={"q_rank": None, "rope": NO_GAIN, "scale": LATENT_SCALE})
GPT2: dict[str, Any] = {"mlp": "gelu_tanh", "mlp_bias": True, "norm": "layer", "learned_positions": True}
CASES: dict[str, tuple[str, TransformerConfig]] = {
    "llama": ("llama", shaped(heads())),
    "llama-tied-wide": ("llama", shaped(heads(head_dim=16, n_kv_heads=4), tie_embeddings=True, norm_eps=1e-5)),
    "llama-bias": ("llama", shaped(heads(bias=True, out_bias=True), mlp_bias=True)),
    "llama-3": ("llama", shaped(heads(rope=Rope(base=5e5, scaling=RopeScaling("llama3", 8.0, 16))))),
    "llama-linear": ("llama", shaped(heads(rope=Rope(scaling=RopeScaling("linear", 2.0))))),
    "llama-yarn": ("llama", shaped(heads(rope=Rope(scaling=YARN)))),
    "llama-yarn-gain": ("llama", shaped(heads(rope=Rope(scaling=RopeScaling("yarn", 4.0, 16, attention_factor=1.3))))),
    "llama-ntk": ("llama", shaped(heads(rope=Rope(scaling=RopeScaling("ntk", 4.0))))),
    "llama-interleaved": ("llama", shaped(heads(rope=Rope(layout="interleaved"), scale=0.5))),
    "mixtral": ("llama", shaped(heads(), experts=MoEConfig(n_experts=4, top_k=2, hidden=48))),
    "qwen2": ("qwen2", shaped(heads(bias=True))),
    "qwen2-yarn": ("qwen2", shaped(heads(bias=True, rope=Rope(scaling=YARN)), tie_embeddings=True)),
    "qwen3": ("qwen3", shaped(heads(head_dim=16, qk_norm=True, scale=0.3))),
    "gemma2": ("gemma2", gemma("lf", {"scale": 0.3, "softcap": 5.0}, logit_softcap=3.0)),
    "gemma2-odd": ("gemma2", gemma("lff", {"softcap": 5.0}, logit_softcap=3.0)),
    "gemma3": ("gemma3", gemma("lllllfl", {"qk_norm": True}, {"rope": FAR}, {"rope": Rope(base=2e4)})),
    "gemma3-third": ("gemma3", gemma("llf", {"qk_norm": True, "scale": 0.3})),
    "gpt2": ("gpt2", shaped(heads(n_kv_heads=4, rope=None, bias=True, out_bias=True), tie_embeddings=True, **GPT2)),
    "qwen2-moe": ("qwen2moe", shaped(heads(bias=True), tie_embeddings=True, experts=MoEConfig(**SHARED))),
    "qwen3-moe": ("qwen3moe", shaped(heads(head_dim=16, qk_norm=True), experts=MoEConfig(**EXPERTS))),
    "deepseek": ("deepseek2", shaped(LATENT, experts=SIGMOIDS)),
    "deepseek-yarn": ("deepseek2", shaped(LATENT_YARN, experts=SIGMOIDS)),
}  # fmt: skip
# Fields that the reader of `transformers` does not read from the file.
UNREAD_FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "qwen3": {"head_dim": 16},
    "gpt2": {"n_positions": 64, "vocab_size": 96, "n_inner": 48},
    "qwen2-moe": {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen3-moe": {"moe_intermediate_size": 24},
}
# Cases that the reader of `transformers` supports: no biases, no scaled positions, no Mixtral, no DeepSeek.
READABLE = [
    "llama", "llama-tied-wide", "llama-ntk", "llama-interleaved", "qwen2", "qwen3", "gemma2", "gpt2",
    "qwen2-moe", "qwen3-moe",
]  # fmt: skip


def random_model(config: TransformerConfig) -> Transformer:
    """Return a model with random weights, norms and biases included, so that swapped ones are noticed."""
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator) * 0.2
        tensor.copy_(noise + (tensor if tensor.dim() == 1 and "bias" not in name else 0))
    return model


@torch.no_grad()
def logits(model: Transformer) -> torch.Tensor:
    out = model.logits(model(IDS))[0]
    assert out.std() > 0.3  # otherwise agreement is trivial
    return out


def export(config: TransformerConfig, folder: Path, **options: Any) -> tuple[Transformer, Path]:
    model, file = random_model(config), folder / "m.gguf"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_gguf(model, file, **options)
    return model, file


@pytest.mark.parametrize("case", READABLE)
def test_gguf_logits_match_transformers(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model, file = export(CASES[case][1], tmp_path)
    # The steps of `from_pretrained(folder, gguf_file=...)`, which needs one more package.
    read = importlib.import_module("transformers.modeling_gguf_pytorch_utils").load_gguf_checkpoint
    unread = UNREAD_FIELDS.get(case, {})
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=file.name, **unread)
    hf_model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = read(str(file), return_tensors=True, model_to_load=hf_model)["tensors"]
    missing, unexpected = hf_model.load_state_dict(tensors, strict=False)
    assert not unexpected and set(missing) <= ({"lm_head.weight"} if model.config.tie_embeddings else set())
    with torch.no_grad():
        found = hf_model(IDS).logits[0]
    torch.testing.assert_close(found, logits(model), atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_gguf_logits_match_llama_cpp(case: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    architecture, config = CASES[case]
    model, file = export(config, tmp_path)
    assert field(file, "general.architecture") == architecture
    engine = llama_cpp(file, n_ctx=64, logits_all=True, type_k=0, type_v=0, flash_attn=False)
    engine.eval(IDS[0].tolist())
    found = torch.from_numpy(engine.scores[: IDS.shape[1]].copy())
    engine.close()
    # llama.cpp's GELU is a table in half precision
    atol = 3e-2 if config.mlp in ("geglu", "gelu_tanh") else 2e-4
    torch.testing.assert_close(found, logits(model), atol=atol, rtol=0)


@pytest.mark.parametrize("case", FIELDS)
def test_gguf_fields_follow_architecture(case: str, tmp_path: Path) -> None:
    architecture, config = CASES[case]
    _, file = export(config, tmp_path)
    reader = gguf.GGUFReader(file)
    for name, want in FIELDS[case].items():
        found = reader.get_field(f"{architecture}.{name}")
        value = None if found is None else found.contents()
        assert value == (pytest.approx(want, rel=1e-6) if isinstance(want, float) else want), name


def test_gguf_tensors_for_llama_cpp_only(tmp_path: Path) -> None:
    def exported(case: str) -> tuple[Transformer, dict[str, np.ndarray]]:
        model, file = export(CASES[case][1], tmp_path)
        tensors = {t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors}
        file.unlink()
        return model, tensors

    _, tensors = exported("llama-3")
    want = rotary_frequencies(8, 5e5) / rotary_frequencies(8, 5e5, RopeScaling("llama3", 8.0, 16))
    np.testing.assert_allclose(tensors["rope_freqs.weight"], want.numpy(), rtol=1e-6)
    assert tensors["rope_freqs.weight"].max() == 8.0
    model, tensors = exported("deepseek")
    both = model.get_parameter("blocks.1.mixer.kv_b.weight").detach().view(4, 22, 16).numpy()
    np.testing.assert_array_equal(tensors["blk.1.attn_k_b.weight"], both[:, :12].swapaxes(1, 2))
    np.testing.assert_array_equal(tensors["blk.1.attn_v_b.weight"], both[:, 12:])
    balance = model.state_dict()["blocks.1.mlp.router.balance_bias"].numpy()
    np.testing.assert_array_equal(tensors["blk.1.exp_probs_b.bias"], balance)


@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_gguf_type_applies_to_matrices_only(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, file = export(CASES["mixtral"][1], tmp_path, kind=kind)
    reader = gguf.GGUFReader(file)
    types = {t.name: t.tensor_type.name for t in reader.tensors}
    low = kind.upper()
    for name, kind in types.items():
        assert kind == ("F32" if "norm" in name or "ffn_gate_inp" in name else low), name
    assert field(file, "general.file_type") == (1 if low == "F16" else 32)
    # values are rounded to that type only
    down = next(t for t in reader.tensors if t.name == "blk.1.ffn_down_exps.weight")
    weights = torch.stack([model.get_parameter(f"blocks.1.mlp.experts.down.{e}") for e in range(4)])
    stored = torch.from_numpy(np.array(down.data)).view(dtype).reshape(weights.shape)
    assert torch.equal(stored, weights.detach().to(dtype))


def test_gguf_unsupported_window_limits_context(tmp_path: Path) -> None:
    model = random_model(shaped(heads(window=20)))
    with pytest.warns(UserWarning, match="longest row is 20"):
        export_gguf(model, tmp_path / "m.gguf")
    assert field(tmp_path / "m.gguf", "llama.context_length") == 20
    assert field(tmp_path / "m.gguf", "tokenizer.ggml.model") == "none"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_gguf(random_model(shaped(heads(window=64))), tmp_path / "n.gguf")
    assert field(tmp_path / "n.gguf", "llama.context_length") == 64


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (shaped(CustomMixer(kind="mamba")), "mixer of layer 0 is 'mamba'"),
        (shaped(heads(sink=True)), "sink is True"),
        (shaped(heads(smear=True)), "smear is True"),
        (shaped(heads(alibi=True)), "alibi is True"),
        (shaped(heads(n_kv_heads=4, rope=None, alibi=True)), "alibi is True"),
        (shaped(heads(), mlp="relu2"), "mlp is 'relu2'"),
        (shaped(heads(), parallel=True), "parallel is True"),
        (shaped(heads(rope=Rope(rotary_dim=4))), "rotary_dim of layer 0 is 4"),
        (shaped({"a": heads(), "b": heads(rope=Rope(rotary_dim=4))}), "rotary_dim of layer 1 is 4"),
        (shaped(heads(rope=Rope(scaling=RopeScaling("yarn", 4.0, 16, low=2.0)))), "low=2.0"),
        (shaped(heads(bias=True, rope=Rope(scaling=RopeScaling("llama3", 8.0, 16)))), "'llama3'"),
        (shaped(heads(head_dim=16, bias=True)), "head_dim is 16"),
        (shaped(heads(qk_norm=True, bias=True, out_bias=True)), "out_bias"),
        (shaped(heads(qk_norm="all_heads")), "qk_norm is 'all_heads'"),
        (shaped(heads(), sandwich=True, pre_norm=False), "pre_norm is False|sandwich is True"),
        (gemma("lf", {"softcap": 5.0}), "logit_softcap is None"),
        (CASES["gemma2"][1].model_copy(update={"tie_embeddings": False}), "tie_embeddings is False"),
        (shaped(LATENT, experts=SIGMOIDS, norm_eps=1e-5), "eps of the latents"),
        (shaped(heads(qk_norm=True), experts=MoEConfig(**EXPERTS, dense_layers=(0,))), "dense_layers"),
        (shaped(heads(qk_norm=True), experts=MoEConfig(**EXPERTS, norm_topk_prob=False)), "norm_topk_prob"),
    ],
)  # fmt: skip
def test_gguf_export_names_unsupported_field(config: TransformerConfig, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        export_gguf(Transformer(config), tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_gguf_export_rejects_bad_model_and_target(tiny_decoder: Any, tmp_path: Path) -> None:
    model, file = export(CASES["llama"][1], tmp_path)
    before, new = file.read_bytes(), tmp_path / "n.gguf"
    huge, double = (random_model(CASES["llama"][1]) for _ in range(2))
    huge.embedding.data[3, 3] = 1e6
    rejected: list[tuple[str, Any, Path, dict[str, Any]]] = [
        ("exists", model, file, {}),
        ("exists", model, tmp_path, {}),
        ("type of a GGUF file is 'q4'", model, new, {"kind": "q4"}),
        (r"weights are torch\.float64", double.double(), new, {}),
        (r"'token_embd.weight' holds 1e\+06", huge, new, {"kind": "f16"}),
        ("embedding_norm is True", tiny_decoder, new, {}),
    ]
    for message, source, target, options in rejected:
        with pytest.raises(ConfigError, match=message):
            export_gguf(source, target, **options)
    assert file.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
