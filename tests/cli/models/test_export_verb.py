"""`whorl export`: the folder or file continues a text as the engine does."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tests.support.cli import refuse, succeed
from tests.support.tiny import make_decoder, make_transformer
from torch.distributed.checkpoint.state_dict_loader import load

from whorl.cli.models.export import write_hf_folder
from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.models import Transformer, load_model
from whorl.models.exchange import export_model
from whorl.models.lora import LoRA, LoRAFactors, init_lora, merge_lora, save_lora
from whorl.tokens.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")
transformers.logging.disable_progress_bar()
TOKENIZER = Tokenizer([bytes([i]) for i in range(256)], ("<|im_start|>", "<|im_end|>"))
TALK = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a llama and a decoder of Whorl that chat in ChatML."""
    folder = tmp_path_factory.mktemp("export")
    models: dict[str, Transformer] = {
        "llama": make_transformer(max_length=256), "own": make_decoder(trained_length=64, ngram_buckets=50),
    }  # fmt: skip
    for name, model in models.items():
        with torch.no_grad():
            model.head_weight.mul_(30)
        export_model(model, folder / name, "whorl")
        TOKENIZER.save(folder / name)
        ids = {"bos_token_id": TOKENIZER.bos_id, "eos_token_id": TOKENIZER.end_ids}
        (folder / name / "generation_config.json").write_text(json.dumps(ids))
        succeed(folder, "import", name)
    return folder


def greedy(folder: Path, ids: list[int], n: int) -> list[int]:
    """Return the engine's ids, up to an id that ends a turn."""
    engine = Engine(load_model(folder), EngineConfig(max_num_seqs=1))
    (found,) = engine.generate([ids], SamplingParams(temperature=0), max_tokens=n)
    tokens = [token.id for token in found.tokens]
    return tokens[: next((k for k, i in enumerate(tokens, start=1) if i in TOKENIZER.end_ids), n)]


@pytest.mark.parametrize("name", ["llama", "own"])
def test_exported_folder_chats_as_the_engine(name: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family = {"llama": "llama", "own": "whorl_decoder"}[name]
    assert succeed(home, "export", name, "--to", "hf", f"{name}-hf").stdout == f"{family}: {name}-hf\n"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(home / "modules"))
    words = transformers.AutoTokenizer.from_pretrained(home / f"{name}-hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(home / f"{name}-hf", trust_remote_code=True)
    assert model.generation_config.eos_token_id == list(TOKENIZER.end_ids)
    inputs = words.apply_chat_template(TALK, add_generation_prompt=True, return_tensors="pt")
    prompt = inputs["input_ids"][0].tolist()
    assert prompt[0] == TOKENIZER.bos_id
    found = model.generate(**inputs, do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
    assert found == greedy(home / name, prompt, 24) and len(set(found)) > 1


def test_gguf_types_and_wrong_options(home: Path) -> None:
    pytest.importorskip("gguf")
    done = succeed(home, "export", "llama", "m.gguf", "--to", "gguf", "--type", "q8_0")
    assert "pre-tokenizer" in done.stderr or "note:" in done.stderr
    assert (home / "m.gguf").stat().st_size < 0.5 * (home / "llama" / "model.safetensors").stat().st_size
    assert "<|im_start|>{{ m.role }}" in (home / "m.gguf").read_bytes().decode("utf-8", "replace")
    done = succeed(home, "export", "llama", "--to", "gguf", "--type", "q4_k")
    assert "tensors are not q4_k" in done.stderr and "gguf: imported-llama.gguf" in done.stdout
    assert "expected: --type f32" in refuse(
        home, "export", "llama", "x", "--to", "gguf", "--dtype", "float16"
    )
    assert "expected: --dtype float32" in refuse(home, "export", "llama", "x", "--type", "q8_0")
    assert "'q4'" in refuse(home, "export", "llama", "x", "--to", "gguf", "--type", "q4")
    assert "embedding_norm is True, not False" in refuse(home, "export", "own", "x", "--to", "gguf")


def test_dcp_folder_is_read_by_torch_and_by_import(home: Path) -> None:
    succeed(home, "export", "llama", "shards", "--to", "dcp")
    succeed(home, "export", "llama", "plain", "--to", "hf")
    assert not list((home / "shards").glob("*.safetensors*"))
    expected = load_file(home / "plain" / "model.safetensors")
    found = {name: torch.zeros_like(t) for name, t in expected.items()}
    load(found, checkpoint_id=home / "shards", no_dist=True)
    assert all(torch.equal(found[name], t) for name, t in expected.items())
    succeed(home, "import", "shards")
    made = succeed(home, "show", "imported/shards", "--json").stdout
    assert json.loads(made)["kind"] == "model"


def test_export_merges_the_adapter_of_a_stage(tmp_path: Path) -> None:
    model = make_transformer()
    export_model(model, tmp_path / "m", "whorl")
    factors = {
        name: LoRAFactors(part.a, torch.full_like(part.b, 0.1), part.scale)
        for name, part in init_lora(model, 2, 4.0, ("out",), torch.Generator().manual_seed(0)).factors.items()
    }
    save_lora(LoRA(factors), tmp_path / "m" / "adapter", "base")
    stage = SimpleNamespace(name="chat/sft", kind="model", path=tmp_path / "m")
    assert write_hf_folder(stage, tmp_path / "out") == "llama"  # type: ignore[arg-type]
    merge_lora(model, LoRA(factors))
    base = load_model(tmp_path / "m", with_adapter=False)
    assert not torch.equal(base.blocks[0].mixer.out.weight, model.blocks[0].mixer.out.weight)
    torch.testing.assert_close(load_model(tmp_path / "out").state_dict(), model.state_dict())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_import_names_quantized_weights(method: str, home: Path) -> None:
    folder = home / method
    folder.mkdir()
    fields = json.loads((home / "llama" / "config.json").read_text()) | {
        "quantization_config": {"quant_method": method}
    }
    (folder / "config.json").write_text(json.dumps(fields))
    printed = refuse(home, "import", method)
    assert f"quantized weights ({method})" in printed and "whorl quantize" in printed
