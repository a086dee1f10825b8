"""Whorl's own decoder in `transformers`, by the modeling file of the exported folder, in a process without Whorl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import decoder_config, draw_zero_parameters

from whorl.engine.config import EngineConfig
from whorl.engine.engine import Engine
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.models import Transformer
from whorl.models.exchange import export_model, find_family, import_model
from whorl.models.transformer_config import MoEConfig, Rope, TransformerConfig, masked_decoder
from whorl.plan.accounting.model_cost import decoder_config as planned_config

pytest.importorskip("transformers")

LENGTH, NEW = 24, 16
SHAPES: dict[str, TransformerConfig] = {
    # As the planner makes them: YaRN tables in rows beyond 12 positions, and in every row of a server.
    "planned": planned_config(64, 2, 264, ngram_buckets=97, trained_length=12),
    "whole": planned_config(64, 2, 264, ngram_buckets=97, trained_length=4096),
    "grouped": decoder_config(
        n_heads=4, smear_keys=False, ngram_orders=(), tie_embeddings=True, logit_softcap=5.0, norm_eps=1e-4
    ),
    "trigrams": decoder_config(ngram_orders=(3,), n_kv_heads=2, max_length=100),
}
# Loads each folder as a user does; `None` in sys.modules makes `import whorl` fail.
SCRIPT = f"""
import json, sys
sys.modules["whorl"] = None
import torch
from transformers import AutoModelForCausalLM, logging
logging.disable_progress_bar()
results = {{}}
for name in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).eval()
    ids = torch.tensor(json.load(open("ids.json")))
    options = dict(do_sample=False, max_new_tokens={NEW}, eos_token_id=None, pad_token_id=0)
    ones = torch.ones_like(ids)
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :5], use_cache=True)
        rest = model(ids[:, 5:], past_key_values=first.past_key_values).logits
        model(ids, labels=ids).loss.item()
    padded = torch.cat([torch.zeros(2, 3, dtype=ids.dtype), ids], 1), torch.cat([0 * ones[:, :3], ones], 1)
    tokens = [
        model.generate(ids, attention_mask=ones, **options)[:, ids.shape[1]:],
        model.generate(padded[0], attention_mask=padded[1], **options)[:, padded[0].shape[1]:],
        model.generate(ids, attention_mask=ones, use_cache=False, **options)[:, ids.shape[1]:],
    ]
    beams = [model.generate(ids, attention_mask=ones, num_beams=3, use_cache=c, **options) for c in (True, False)]
    assert torch.equal(*beams), name
    torch.save({{"whole": whole, "cached": torch.cat([first.logits, rest], 1), "tokens": tokens}}, f"{{name}}.pt")
"""


def random_model(config: TransformerConfig) -> Transformer:
    """A network whose gains, temperatures, shares and tables are all random, so that a mistake is noticed."""
    generator = torch.Generator().manual_seed(0)
    model = draw_zero_parameters(Transformer(config, generator), generator).eval().requires_grad_(False)
    for p in model.parameters():
        if p.dim() == 1 or p.shape[-1] == 1:
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    model.head_weight.mul_(30 if config.tie_embeddings is False else 3)
    return model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Transformer], torch.Tensor]:
    folder = tmp_path_factory.mktemp("decoders")
    ids = torch.randint(0, 264, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    (folder / "ids.json").write_text(json.dumps(ids.tolist()))
    models = {name: random_model(config) for name, config in SHAPES.items()}
    for name, model in models.items():
        assert find_family(model.config) == "whorl_decoder"
        export_model(model, folder / name, "whorl_decoder")
    environment = {**os.environ, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    command = [sys.executable, "-c", SCRIPT, *models]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder, models, ids


@pytest.mark.parametrize("name", SHAPES)
def test_decoder_in_transformers_equals_whorl(name: str, exported: Any) -> None:
    folder, models, ids = exported
    found, model = torch.load(folder / f"{name}.pt"), models[name]
    want = model.logits(model(ids))
    assert want.std() > 0.5  # otherwise agreement is trivial
    for logits in (found["whole"], found["cached"]):
        torch.testing.assert_close(logits, want, atol=1e-4, rtol=0)
    engine = Engine(model, EngineConfig(max_num_seqs=2))  # with the context of `whorl serve`
    generations = engine.generate(ids.tolist(), SamplingParams(temperature=0), max_tokens=NEW)
    tokens = [[token.id for token in generation.tokens] for generation in generations]
    assert len({i for row in tokens for i in row}) > 1  # no constant
    for other in found["tokens"]:
        assert other.tolist() == tokens


def test_exported_decoder_is_imported_unchanged(exported: Any) -> None:
    folder, models, _ = exported
    for name, model in models.items():
        back = import_model(folder / name)
        assert back.config.model_dump() | {"mixers": 0} == model.config.model_dump() | {"mixers": 0}
        torch.testing.assert_close(back.state_dict(), model.state_dict(), atol=0, rtol=0)
    assert "whorl" not in [line.split()[1] for line in (folder / "whole" / "modeling_whorl.py").read_text().splitlines()
                           if line.startswith(("import ", "from "))]  # fmt: skip


HEADS = decoder_config().mixers["attention"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"experts": MoEConfig(n_experts=4, top_k=2, hidden=24)}, "experts is"),
        (
            {"mixers": {"a": HEADS.model_copy(update={"window": 8, "backend": "auto"})}},
            "window is 8, not None",
        ),
        ({"mixers": {"a": HEADS.model_copy(update={"rope": Rope(layout="interleaved")})}}, "rope"),
        ({"mixers": {"m": {"kind": "mamba"}}, "trained_length": None}, "mixer of layer 0 is 'mamba'"),
        ({"sandwich": True}, "sandwich is True, not False"),
    ],
)
def test_decoder_export_names_what_the_file_lacks(
    changes: dict[str, Any], named: str, tmp_path: Path
) -> None:
    config = TransformerConfig.model_validate({**dict(decoder_config()), **changes})
    with pytest.raises(ConfigError, match=named):
        export_model(Transformer(config), tmp_path / "x", "whorl_decoder")
    with pytest.raises(ConfigError, match="no family can express"):
        find_family(config)
    assert not (tmp_path / "x").exists()


def test_decoder_export_refuses_masked_diffusion() -> None:
    with pytest.raises(ConfigError, match="masked"):
        find_family(masked_decoder(decoder_config(), 263, None, 64))
