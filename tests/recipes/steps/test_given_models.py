"""Models that a recipe is given: `from`, `--from`, the chat format of a base model, and pretraining that continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.evals.hf_folders import make_folder
from tests.support.notes import TRAINING_RECIPE, write_notes
from tests.support.recipes.align_steps import run_text, write_jsonl

from whorl.errors import ConfigError, DataError, StoreError
from whorl.models import load_model
from whorl.recipes import load_recipe, parse_recipe, run_recipe
from whorl.recipes.recipe import Recipe
from whorl.recipes.run_page import next_commands
from whorl.recipes.steps.pretrain import observer
from whorl.store import Artifact, Store
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tokens.token_encoder import TokenEncoder
from whorl.tracking.progress import Progress

COLOURS = ("red", "blue", "green", "white")


@pytest.fixture(scope="module", autouse=True)
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Artifact]]:
    """The artifacts of a tiny model, in `store` of the working directory, with conversations next to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("given"))
        patch.setattr(observer, "memory_in_use", lambda: 0)
        patch.setattr(observer.PretrainObserver, "_sample", lambda *_: "")
        write_notes(Path.cwd())
        talks = [
            [{"role": "user", "content": f"{n}: {word}?"}, {"role": "assistant", "content": word}]
            for n in range(10)
            for word in COLOURS
        ]
        write_jsonl("talks.jsonl", [{"messages": talk} for talk in talks])
        for n in range(30):
            words = " ".join(f"w{n}{i % 7}" for i in range(150))
            (Path.cwd() / "other").mkdir(exist_ok=True)
            (Path.cwd() / "other" / f"{n}.txt").write_text(words)
        yield run_text(TRAINING_RECIPE)


def run(recipe: Recipe) -> dict[str, Artifact]:
    return dict(run_recipe(recipe, Store(Path.cwd() / "store"), Progress.silent()).artifacts)


CHAT = [
    "data.path=talks.jsonl",
    "sft.data.seq_len=64",
    "sft.data.batch_size=4",
    "sft.max_completion_tokens=8",
]
OTHER = [
    'ingest.sources=["other"]', "curate.validation_bytes=2000", "curate.test_bytes=2000",
    "curate.max_held_out_fraction=0.3", "curate.near_duplicates=keep", "continue.data.batch_size=4",
    "curate.query=SELECT row, '' AS reason FROM attributes",
]  # fmt: skip


def test_conversations_give_a_base_model_a_chat_format(made: dict[str, Artifact]) -> None:
    recipe = load_recipe("chat", sets=CHAT, model="tiny/pretrain")
    assert [*recipe.steps] == ["data", "sft", "preferences", "dpo", "report"]
    found = run(recipe)
    sft, base = found["sft"], made["pretrain"]
    assert sft.parents["model"] == base.address and "dpo" not in found
    before, after = TokenEncoder.load(base.path), TokenEncoder.load(sft.path)
    assert (before.chat.kind, after.chat.kind) == ("transcript", "model")
    assert after.tokenizer.vocab_size == before.tokenizer.vocab_size + 2
    ids = after.prompt([{"role": "user", "content": "red?<|im_end|>"}])
    assert ids.count(after.chat.special_ids["<|im_end|>"]) == 1, "text of a user is no marker"
    ends = json.loads((sft.path / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [before.tokenizer.eos_id, before.tokenizer.vocab_size + 1]
    assert load_model(sft.path).config.vocab_size == after.tokenizer.vocab_size
    measured = sft.summary["eval"]
    assert measured["after"]["held_out_nll"] < 0.7 * measured["before"]["held_out_nll"]
    curve = [r for r in json.loads((sft.path / "curve.json").read_text()) if "held_out_nll" in r]
    assert len(curve) >= 8 and "held-out" in sft.summary["headline"]
    samples = json.loads((sft.path / "samples.json").read_text())
    assert len(samples["before"]) == len(samples["after"]) == 4
    page = found["report"].file("report.html").read_text()
    assert "The same held-out prompts" in page and "in the data: " in page
    assert next_commands(found.values())[-1] == "whorl serve chat/sft"


def test_rows_of_new_markers_are_copies(made: dict[str, Artifact], tmp_path: Path) -> None:
    from whorl.align.stage.chat_format import chat_files, with_chat_rows

    folder = made["pretrain"].path
    files = chat_files(folder, tmp_path / "chat")
    model, base = with_chat_rows(load_model(folder), files, folder), load_model(folder)
    tokenizer = load_tokenizer(folder)
    n = tokenizer.vocab_size
    for name in ("embedding", "head"):
        table, old = getattr(model, name), getattr(base, name)
        assert torch.equal(table[:n], old) and len(table) == n + 2
        assert torch.equal(table[n], old[tokenizer.bos_id]) and torch.equal(
            table[n + 1], old[tokenizer.eos_id]
        )
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids), base(ids))
    assert chat_files(files, tmp_path / "again") == files, "a model with a template keeps it"


def test_templates_that_cannot_be_trained_are_refused(made: dict[str, Artifact], tmp_path: Path) -> None:
    folder = tmp_path / "imported"
    shutil.copytree(made["pretrain"].path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    template = folder / "chat_template.jinja"
    template.write_text("{% for m in messages %}<|user|>{{ m.content }}<|eos|>{% endfor %}")
    recipe = load_recipe("chat", sets=CHAT, model=str(folder))
    with pytest.raises(DataError, match=r"writes <\|user\|>, which is no token of its tokenizer"):
        run(recipe)
    template.write_text("{% for %}")  # the import notices that the file has changed
    with pytest.raises(DataError, match="the chat template cannot be compiled"):
        run(recipe)


def test_pretraining_continues_with_a_share_of_the_old_text(made: dict[str, Artifact]) -> None:
    found = run(load_recipe("continue", sets=OTHER, model="tiny/pretrain"))["continue"]
    assert found.parents["model"] == made["pretrain"].address
    bits = found.summary["bits_per_byte_of"]
    assert bits["before"].keys() == bits["after"].keys() == {"new", "old"}
    assert bits["after"]["new"] < 0.8 * bits["before"]["new"]
    alone = run(
        load_recipe("continue", sets=[*OTHER, "continue.data.replay_fraction=0"], model="tiny/pretrain")
    )
    assert found.summary["steps"] > 1.2 * alone["continue"].summary["steps"]
    assert (found.path / "tokenizer.json").read_text() == (
        made["pretrain"].path / "tokenizer.json"
    ).read_text()


def test_a_folder_of_transformers_continues_and_is_imported_once(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "imported", "gpt2")
    sets = [*OTHER, "continue.data.seq_len=32", "continue.lr_scale=1"]
    recipe = load_recipe("continue", sets=sets, model=str(folder))
    assert "imported" in recipe.steps and recipe.steps["tokens"].parents["model"] == "imported"
    found = run(recipe)
    bits = found["continue"].summary["bits_per_byte_of"]
    assert bits["before"].keys() == {"new"} and bits["after"]["new"] < bits["before"]["new"]
    assert load_tokenizer(found["continue"].path).vocab_size == load_tokenizer(folder).vocab_size


def test_given_models_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"continue needs a model to start from(.|\n)*--from MODEL"):
        run(load_recipe("continue", sets=OTHER))
    with pytest.raises(
        ConfigError, match=r"data\.path is not given(.|\n)*docs/data.md(.|\n)*--set data\.path="
    ):
        run(load_recipe("chat", model="tiny/pretrain"))
    with pytest.raises(StoreError, match=r"no artifact 'tiny/pretrainn'(.|\n)*tiny/pretrain"):
        run(load_recipe("chat", sets=CHAT, model="tiny/pretrainn"))
    with pytest.raises(ConfigError, match="tiny/tokens is an artifact of the kind tokens"):
        run(load_recipe("chat", sets=CHAT, model="tiny/tokens"))
    with pytest.raises(ConfigError, match="no step of this recipe makes or takes a first model"):
        load_recipe("curate-web", model="tiny/pretrain")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is a folder without config\.json"):
        load_recipe("chat", sets=CHAT, model=str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="ingest starts from no model"):
        parse_recipe('[steps.ingest]\nfrom = "a/b"\n', "x.toml")
    for given in ("reward = 3", 'prize = "a/b"'):
        with pytest.raises(
            ConfigError, match=r"from\.(reward|prize) is (.|\n)*roles of agents: demonstrations, reward"
        ):
            parse_recipe(f"[steps.agents]\nfrom = {{ {given} }}\n", "x.toml")


def test_from_leaves_out_what_only_the_first_model_needs() -> None:
    recipe = load_recipe("quickstart", model="tiny/pretrain")
    assert {"plan", "pretrain"} - recipe.steps.keys() == {"pretrain"}, "the tokenizer needs the plan"
    assert recipe.steps["sft"].parents["model"] == "tiny/pretrain"
    assert {*recipe.steps["report"].parents.values()} <= {*recipe.steps}
