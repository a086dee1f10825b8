"""The steps `draft` and `multi_token`, and serving what they make: equal text, acceptance rates, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.notes import write_notes
from tests.support.recipes.align_recipes import ARITHMETIC, INIT_MODEL, TRAINED
from tests.support.recipes.align_steps import run_text
from tests.support.serve.live_server import running
from tests.support.tiny import make_decoder

from whorl.engine.config import EngineConfig
from whorl.engine.speculation.load import Speculation
from whorl.errors import ConfigError
from whorl.machine.device_probe import probe
from whorl.models import read_config, save_model
from whorl.report.blocks import StepReport, Table
from whorl.serve.app_state import AppState
from whorl.serve.config import ServeConfig
from whorl.serve.worker.disaggregated_model import ModelEngineFactory
from whorl.serve.worker.model_loading import ModelLocation
from whorl.store import Artifact
from whorl.tokens.tokenizer import Tokenizer

MACHINE = dataclasses.replace(probe(), device="cpu", dtype="float32")
RECIPE = f"""{INIT_MODEL}{ARITHMETIC}{TRAINED}
[steps.draft]
parents = ["trained", "sums"]
data.seq_len = 64
data.epochs = 4
lr_scale = 0.5
data.batch_tokens = 200
model.dtype = "float32"
texts = {{ held_out_prompts = 4, held_out_tokens = 16 }}
[steps.multi_token]
parents = ["trained", "sums"]
data.seq_len = 64
data.epochs = 6
n_predict = 3
model.dtype = "float32"
texts = {{ held_out_prompts = 4, held_out_tokens = 16 }}
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Artifact]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_notes(tmp_path_factory.mktemp("drafts")))
        yield run_text(RECIPE)


@pytest.mark.parametrize("name", ["draft", "multi_token"])
def test_step_reports_acceptance_and_speed(made: dict[str, Artifact], name: str) -> None:
    summary = made[name].summary
    found = summary["speculation"]
    assert 0.2 < found["acceptance_rate"] <= 1 and found["equal"] == 1.0 and found["tokens_per_step"] > 1.1
    assert found["tokens_per_second"] > 0 and "drafts accepted" in summary["headline"]
    blocks = StepReport.read(made[name].file("report.json")).blocks
    (table,) = [b for b in blocks if isinstance(b, Table) and b.title == "Speculative decoding"]
    assert table.rows[0][:2] == [name, f"{found['acceptance_rate']:.0%}"]


def test_draft_is_smaller_and_heads_keep_the_model(made: dict[str, Artifact]) -> None:
    assert read_config(made["draft"].path).n_layers == 1
    files = [made[name].path / "model.safetensors" for name in ("trained", "multi_token")]
    assert files[0].read_bytes() == files[1].read_bytes()


def factory(folder: Path, **speculation: Any) -> ModelEngineFactory:
    sizes = EngineConfig(max_num_seqs=4, block_size=16)
    place = ModelLocation(str(folder), None, "target")
    return ModelEngineFactory(place, MACHINE, sizes, 96, 1 << 24, speculation=Speculation(**speculation))


@pytest.mark.parametrize("kind", ["draft", "multi_token"])
def test_served_text_equals_that_without_drafts(made: dict[str, Artifact], kind: str) -> None:
    given: dict[str, Any] = {"draft": made["draft"].path} if kind == "draft" else {"multi_token": True}
    folder = made["trained" if kind == "draft" else "multi_token"].path
    models, engine = factory(made["trained"].path).load()
    others, speculative = factory(folder, **given).load("decode")
    assert factory(folder, **given).load("prefill")[1].proposer is None
    with (
        running(AppState(ServeConfig(port=0), models, engine)) as one,
        running(AppState(ServeConfig(port=0), others, speculative)) as other,
    ):
        for prompt in ("1+2=", "7+1=", "12-3="):
            for sampling in (
                {"temperature": 0},
                {"temperature": 1.0, "seed": 5},
                {"temperature": 0.7, "seed": 2, "n": 3},
            ):
                body = {"model": "target", "prompt": prompt, "max_tokens": 24, "ignore_eos": True, **sampling}
                want, got = (s.post("/v1/completions", json=body).json()["choices"] for s in (one, other))
                assert [c["text"] for c in want] == [c["text"] for c in got]
        lines = dict(
            line.rsplit(" ", 1)
            for line in other.get("/metrics").text.splitlines()
            if not line.startswith("#")
        )
    assert float(lines["whorl_engine_drafted_tokens"]) > 0 and float(lines["whorl_engine_draft_seconds"]) > 0
    assert 0 < float(lines["whorl_engine_acceptance_rate"]) <= 1


def test_draft_of_another_tokenizer_is_refused(made: dict[str, Artifact], tmp_path: Path) -> None:
    save_model(make_decoder(d_model=16, n_layers=1), tmp_path)
    Tokenizer([*(bytes([i]) for i in range(256)), b"1+"]).save(tmp_path)
    with pytest.raises(ConfigError, match=r"the draft model .* id 256 is"):
        factory(made["trained"].path, draft=tmp_path).load()
    with pytest.raises(ConfigError, match="no multi-token heads"):
        factory(made["trained"].path, multi_token=True).load()
