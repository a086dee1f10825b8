"""The steps preferences, preference, reward_model, and data sets from files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from tests.support.recipes.align_recipes import ARITHMETIC, CORPUS, INIT_MODEL, PREFERENCES
from tests.support.recipes.align_steps import run_text, write_code, write_jsonl

from whorl.align.data import dataset_files
from whorl.align.data.dataset_files import read_preferences, split_by_prompt, write_dataset
from whorl.align.data.formats import Conversation, Preference, PromptCompletion, UnpairedPreference
from whorl.align.preference.reward_model import load_reward_verifier
from whorl.errors import ConfigError, DataError
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.requests import Completion
from whorl.models import load_model
from whorl.recipes import load_recipe
from whorl.report.blocks import Curve, StepReport
from whorl.tokens.token_encoder import TokenEncoder

SETTINGS = (
    'parents = ["init_model", "likes"]\ndata.seq_len = 16\ndata.batch_size = 12\nmodel.dtype = "float32"\n'
)
PREFERENCE = f"{INIT_MODEL}{PREFERENCES}[steps.preference]\n{SETTINGS}data.epochs = 4\nlr_scale = 0.3\n"
REWARD_MODEL = f"{INIT_MODEL}{PREFERENCES}[steps.reward_model]\n{SETTINGS}data.epochs = 6\nlr_scale = 0.5\n"


def pairs(prompts: Iterable[str]) -> list[dict[str, str]]:
    """Pairs in which `yes` is preferred to `nay`, which has the same length."""
    return [{"prompt": prompt, "chosen": "yes", "rejected": "nay"} for prompt in prompts]


@pytest.fixture(scope="module", autouse=True)
def _in_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a folder with the input files; `store` in it is shared by all tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("stages"))
        write_jsonl("likes.jsonl", pairs(f"{i}?" for i in range(48)))
        yield


def test_datasets_round_trip(tmp_path: Path) -> None:
    messages = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028c"})
    first, second = messages[:1], messages[1:]
    worse = ({**messages[1], "content": "d"},)
    for name, items in (
        ("conversations", [Conversation(messages, "x", "1"), Conversation(messages)]),
        ("preferences", [Preference("p ", "p q", "p r"), Preference(first, second, worse)]),
        (
            "unpaired",
            [UnpairedPreference("p", "q", False, "s", "2"), UnpairedPreference(first, second, True)],
        ),
    ):
        assert write_dataset(tmp_path, name, "train", items) == 2
        assert getattr(dataset_files, f"read_{name}")(tmp_path, "train") == items
    read_unpaired = dataset_files.read_unpaired
    assert write_dataset(tmp_path, "unpaired", "test", []) == 0 and read_unpaired(tmp_path, "test") == []
    (tmp_path / "unpaired.train.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(DataError, match=r"unpaired\.train\.jsonl, line 1"):
        read_unpaired(tmp_path, "train")


def test_split_by_prompt_is_disjoint_and_seeded() -> None:
    pairs = [PromptCompletion(f"{i % 20}", f"{i}") for i in range(60)]
    sides = split_by_prompt(pairs, 0.2, seed=1)
    prompts = {name: {pair.prompt for pair in side} for name, side in sides.items()}
    assert len(prompts["test"]) == 4 and not prompts["test"] & prompts["train"]
    assert sorted(p.completion for side in sides.values() for p in side) == sorted(
        p.completion for p in pairs
    )
    assert split_by_prompt(pairs[::-1], 0.2, 1)["test"][0].prompt == sides["test"][0].prompt
    assert prompts["test"] != {pair.prompt for pair in split_by_prompt(pairs, 0.2, seed=2)["test"]}


def test_preferences_from_python_code() -> None:
    """Train and test functions come from different files; each rejected body has one bug."""
    write_code(Path("code"))
    text = f"""name = "stages"{CORPUS}
[steps.preferences]
parents = ["ingest", "curate"]
bug_kinds = ["operator", "return"]
max_test = 4
"""
    found = run_text(text)["preferences"]
    train, test = (read_preferences(found.path, split) for split in ("train", "test"))
    assert found.kind == "preferences" and len(train) > 20 and len(test) == 4
    assert found.summary["counts"] == {"train": len(train), "test": 4}
    assert set(found.summary["bug_kinds"]["train"]) <= {"operator", "return", "none"}
    assert not {p.source for p in train} & {p.source for p in test}
    assert all(p.chosen != p.rejected and p.id.endswith(("operator", "return")) for p in train)


def test_preferences_file_quarantines_bad_records() -> None:
    good = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)]
    bad = ["{", {"prompt": "x", "chosen": "a", "rejected": "a"}, {"text": "no"}]
    write_jsonl("some.jsonl", [*good, *bad])
    recipe = 'name = "x"\n' + PREFERENCES.replace("likes.jsonl", "some.jsonl")
    found = run_text(recipe)["likes"]
    assert found.summary["counts"] == {"train": 7, "test": 2}
    assert found.summary["quarantine"] == {"accepted": 9, "bad_json": 1, "identical": 1, "unknown_shape": 1}
    assert "3 records in quarantine" in found.summary["headline"]
    quarantined = map(json.loads, (found.path / "quarantine.jsonl").read_text().splitlines())
    reasons = [(record["line"], record["reason"]) for record in quarantined]
    assert reasons == [(10, "bad_json"), (11, "identical"), (12, "unknown_shape")]
    write_jsonl("some.jsonl", [*good, {"prompt": "new", "chosen": "a", "rejected": "b"}])
    assert run_text(recipe)["likes"].address != found.address
    write_jsonl("some.jsonl", bad)
    with pytest.raises(DataError, match=r"some\.jsonl has no usable record"):
        run_text(recipe)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_preference_raises_implicit_accuracy(objective: str) -> None:
    found = run_text(PREFERENCE, f"preference.objective={objective}")["preference"]
    before, after = (found.summary["held_out"][when] for when in ("before", "after"))
    assert found.kind == "model" and found.summary["items"] == {"train": 36, "test": 12}
    assert after["rewards/margin"] > before["rewards/margin"] and after["implicit_accuracy"] == 1.0
    assert "36 pairs; held out: implicit accuracy" in found.summary["headline"]
    load_model(found.path)
    TokenEncoder.load(found.path)
    assert json.loads((found.path / "curve.json").read_text())[0]["step"] == 1
    curve = next(b for b in StepReport.read(found.file("report.json")).blocks if isinstance(b, Curve))
    assert curve.title == "preference: loss" and curve.note.startswith(f"Loss of {objective.upper()} per ")


def test_unpaired_completions_need_kto_and_get_it() -> None:
    answers = ({"completion": "nay", "label": False}, {"completion": "yes", "label": True})
    write_jsonl("unpaired.jsonl", [{"prompt": f"{i}?", **answer} for i in range(24) for answer in answers])
    text = PREFERENCE.replace('likes.jsonl"', 'unpaired.jsonl", shape = "unpaired"')
    with pytest.raises(DataError, match=r'(?s)but preference needs pairs.*preference\.objective = "kto"'):
        run_text(text, "preference.objective=dpo")
    found = run_text(text)["preference"]  # without an objective the data choose
    assert found.summary["objective"] == "kto"
    assert found.summary["held_out"]["after"]["rewards/margin"] > 0
    assert "36 completions" in found.summary["headline"]


def test_preference_refuses_only_too_long_pairs() -> None:
    write_jsonl("long.jsonl", pairs(f"{i:07}?" for i in range(48)))
    with pytest.raises(DataError, match=r"no example is left to train; 36 rejected: longer than 8 ids"):
        run_text(PREFERENCE.replace("likes.jsonl", "long.jsonl"), "preference.data.seq_len=8")


def test_reward_model_reports_and_scores_rl() -> None:
    text = f"""{ARITHMETIC}{REWARD_MODEL}
[steps.rl]
parents = ["init_model", "sums", "reward_model"]
steps = 2
prompts_per_step = 2
group_size = 4
max_completion_tokens = 6
max_seq_len = 64
model.dtype = "float32"
"""
    found = run_text(text)
    reward, rl = found["reward_model"], found["rl"]
    figures = json.loads((reward.path / "evaluation.json").read_text())
    assert reward.kind == "reward_model"
    assert figures["accuracy"] == reward.summary["held_out"]["accuracy"] == 1.0
    assert {"calibration_error", "reliability", "length"} <= figures.keys()
    assert "accuracy 100.0%" in reward.summary["headline"] and "nan" not in reward.summary["headline"]
    task = VerifiableTask("t", prompt="7?")
    yes, no = load_reward_verifier(reward.path, "float32")(
        [task, task], [Completion("yes"), Completion("nay")]
    )
    assert yes.value > no.value and yes.reason.startswith("reward ")
    measured = rl.summary["eval"]
    assert 0 < measured["before"]["reward_model_score"] < 1 and "reward model score" in rl.summary["headline"]
    rewards = [record["reward"] for record in json.loads((rl.path / "curve.json").read_text())]
    assert all(0 < r < 1 for r in rewards)  # rewards of the reward model; the verifier gives 0


def test_sft_trains_on_conversations_from_parquet() -> None:
    """Also with a LoRA adapter, which is merged into the stored weights."""
    colours = ("red", "blue", "green", "white") * 6
    talks = [[("user", f"Say {word}."), ("assistant", word)] for word in colours]
    messages = [[{"role": role, "content": content} for role, content in talk] for talk in talks]
    pq.write_table(pa.table({"messages": [*messages, []]}), "talks.parquet")
    settings = "data.seq_len = 64\ndata.batch_size = 3\ndata.epochs = 12\n"
    text = f"""{INIT_MODEL}
steps.talks = {{ uses = "tasks", source = "files", path = "talks.parquet" }}
[steps.sft]
parents = ["init_model", "talks"]
lr_scale = 1.0
model.dtype = "float32"
{settings}"""
    found = run_text(text)
    assert found["talks"].summary["quarantine"] == {"accepted": 24, "empty": 1}
    assert found["talks"].summary["counts"] == {"train": 18, "test": 6}
    sft = found["sft"]
    assert sft.summary["texts"] == 18 and sft.summary["final"]["nll"] < 0.7
    adapted = run_text(text, "sft.model.lora.rank=4", 'sft.model.lora.target_modules=["mixer.out"]')["sft"]
    made = (found["init_model"], sft, adapted)
    before, full, low = (load_file(artifact.file("model.safetensors")) for artifact in made)
    moved = {name for name in before if not before[name].equal(low[name])}
    rows = moved & {"embedding", "head"}  # of the markers of turns
    assert len(moved - rows) == 2 and all("mixer.out" in name for name in moved - rows)
    assert [int((before[name] != low[name]).any(1).sum()) for name in sorted(rows)] == [2, 2]
    assert any(not before[name].equal(full[name]) for name in before.keys() - moved)
    with pytest.raises(ConfigError, match=r"sft\.model\.lora\.rank cannot be 'many'"):
        run_text(text, "sft.model.lora.rank=many")
    with pytest.raises(DataError, match="has texts to learn from, but no tasks"):
        run_text(text.replace(settings, 'uses = "rl"\nmax_completion_tokens = 8\n'))


def test_sft_needs_solutions() -> None:
    tasks = [{"prompt": f"{i}+1=", "verifier": "numeric", "answer": i + 1} for i in range(8)]
    write_jsonl("own.jsonl", tasks)
    own = 'steps.own = { uses = "tasks", source = "files", path = "own.jsonl", shape = "tasks" }\n'
    learn = '[steps.sft]\nparents = ["init_model", "own"]\ndata.seq_len = 32\n'
    with pytest.raises(DataError, match="has tasks but no solutions"):
        run_text(INIT_MODEL + own + learn)
    with pytest.raises(ConfigError, match=r"own\.path is not given"):
        run_text(INIT_MODEL + own.replace('path = "own.jsonl", ', ""))
    write_jsonl("pairs.jsonl", [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)])
    given = own.replace("own.jsonl", "pairs.jsonl").replace('shape = "tasks"', 'shape = "pairs"')
    assert run_text(INIT_MODEL + given + learn)["sft"].summary["texts"] == 7


def test_align_code_chains_all_stages() -> None:
    recipe = load_recipe("align-code", sets=["sft.model.lora.rank=8", "distil.student.n_layers=3"])
    stages = ["pretrain", "midtrain", "sft", "preference", "rl", "distil"]
    assert [recipe.steps[b].parents["model"] for b in stages[1:]] == stages[:-1]
    assert recipe.steps["sft"].config.model.lora.rank == 8
