"""The stages beside SFT and RL: what they learn from, what they leave behind, and what they refuse."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file
from tests.support.recipes.align_steps import BEGIN, CORPUS, LIKES, SUMS, code, likes, lines, made

from whorl.align.data.dataset_files import (
    read_conversations,
    read_preferences,
    read_unpaired,
    split_by_prompt,
    write_dataset,
)
from whorl.align.data.formats import Conversation, Preference, PromptCompletion, UnpairedPreference
from whorl.align.preference.reward_model import load_reward_verifier
from whorl.align.stage.io import load_example_tokenizer
from whorl.errors import ConfigError, DataError
from whorl.evals.verify.task import VerifiableTask
from whorl.models import load_model
from whorl.recipes import load_recipe
from whorl.recipes.stage_report import stage_summary
from whorl.report.data import StageSection
from whorl.report.stages import stage_charts
from whorl.store import Artifact

PREFER = (
    BEGIN
    + LIKES
    + """
[steps.preference]
parents = ["init_model", "likes"]
seq_len = 16
batch_size = 12
epochs = 4
lr_scale = 0.3
dtype = "float32"
"""
)
REWARD = (
    BEGIN
    + LIKES
    + """
[steps.reward_model]
parents = ["init_model", "likes"]
seq_len = 16
batch_size = 12
epochs = 6
lr_scale = 0.5
dtype = "float32"
"""
)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files lie; the store, which all tests share, is `store` in it."""
    place = tmp_path_factory.mktemp("stages")
    likes(place / "likes.jsonl")
    return place


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


def weights(artifact: Artifact) -> dict[str, np.ndarray]:
    return {
        name: tensor.numpy()
        for file in sorted(artifact.path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def test_sets_come_back_as_they_were(tmp_path: Path) -> None:
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b\u2028c"})
    talks = [Conversation(said, "x", "1"), Conversation(said)]
    texts = [Preference("p ", "p q", "p r"), Preference(said[:1], said[1:], ({**said[1], "content": "d"},))]
    judged = [UnpairedPreference("p", "q", False, "s", "2"), UnpairedPreference(said[:1], said[1:], True)]
    for name, items in (("conversations", talks), ("preferences", texts), ("unpaired", judged)):
        assert write_dataset(tmp_path, name, "train", items) == 2
    assert read_conversations(tmp_path, "train") == talks
    assert read_preferences(tmp_path, "train") == texts
    assert read_unpaired(tmp_path, "train") == judged
    assert write_dataset(tmp_path, "unpaired", "test", []) == 0 and read_unpaired(tmp_path, "test") == []
    (tmp_path / "unpaired.train.jsonl").write_text('{"prompt": "p"}\n')
    with pytest.raises(DataError, match=r"unpaired\.train\.jsonl, line 1"):
        read_unpaired(tmp_path, "train")


def test_no_prompt_is_on_both_sides() -> None:
    pairs = [PromptCompletion(f"{i % 20}", f"{i}") for i in range(60)]
    sides = split_by_prompt(pairs, 0.2, seed=1)
    asked = {name: {pair.prompt for pair in side} for name, side in sides.items()}
    assert len(asked["test"]) == 4 and not asked["test"] & asked["train"]
    assert sorted(p.completion for side in sides.values() for p in side) == sorted(
        p.completion for p in pairs
    )
    assert split_by_prompt(pairs[::-1], 0.2, 1)["test"][0].prompt == sides["test"][0].prompt
    assert asked["test"] != {pair.prompt for pair in split_by_prompt(pairs, 0.2, seed=2)["test"]}


def test_preferences_out_of_code(folder: Path) -> None:
    """Functions of training files to learn from, those of test files held out; what is rejected has one fault."""
    code(folder / "code")
    text = (
        'name = "stages"'
        + CORPUS
        + """
[steps.preferences]
parents = ["ingest", "curate"]
bug_kinds = ["operator", "return"]
max_test = 4
"""
    )
    found = made(text, folder / "store")["preferences"]
    train, test = (read_preferences(found.path, split) for split in ("train", "test"))
    assert found.kind == "preferences" and len(train) > 20 and len(test) == 4
    assert found.summary["counts"] == {"train": len(train), "test": 4}
    assert set(found.summary["faults"]["train"]) <= {"operator", "return", "none"}
    assert not {p.source for p in train} & {p.source for p in test}
    assert all(p.chosen != p.rejected and p.id.endswith(("operator", "return")) for p in train)


def test_a_file_of_preferences_is_read_with_its_bad_records_told(folder: Path, tmp_path: Path) -> None:
    good = [{"prompt": f"{i}", "chosen": "a", "rejected": "b"} for i in range(9)]
    bad = ["{", {"prompt": "x", "chosen": "a", "rejected": "a"}, {"text": "no"}]
    lines(folder / "some.jsonl", [*good, *bad])
    recipe = LIKES.replace("likes.jsonl", "some.jsonl")
    found = made(f'name = "x"\n{recipe}', folder / "store")["likes"]
    assert found.summary["counts"] == {"train": 7, "test": 2}
    assert found.summary["quarantine"] == {"accepted": 9, "bad_json": 1, "identical": 1, "unknown_shape": 1}
    assert "3 records in quarantine" in found.summary["headline"]
    aside = [json.loads(line) for line in (found.path / "quarantine.jsonl").read_text().splitlines()]
    assert [(record["line"], record["reason"]) for record in aside] == [
        (10, "bad_json"), (11, "identical"), (12, "unknown_shape"),
    ]  # fmt: skip
    lines(folder / "some.jsonl", [*good, {"prompt": "new", "chosen": "a", "rejected": "b"}])
    assert made(f'name = "x"\n{recipe}', folder / "store")["likes"].address != found.address
    lines(folder / "some.jsonl", bad)
    with pytest.raises(DataError, match=r"some\.jsonl holds not one record"):
        made(f'name = "x"\n{recipe}', folder / "store")


@pytest.mark.parametrize("objective", ["dpo", "ipo", "simpo", "orpo", "kto"])
def test_what_is_preferred_becomes_the_likelier(folder: Path, objective: str) -> None:
    found = made(PREFER, folder / "store", f"preference.objective={objective}")["preference"]
    before, after = (found.summary["held_out"][when] for when in ("before", "after"))
    assert found.kind == "model" and found.summary["items"] == {"train": 36, "test": 12}
    assert after["rewards/margin"] > before["rewards/margin"] and after["implicit_accuracy"] == 1.0
    assert "36 pairs; held out: the better one is the likelier in" in found.summary["headline"]
    load_model(found.path)
    load_example_tokenizer(found.path)
    assert json.loads((found.path / "curve.json").read_text())[0]["step"] == 1
    section = StageSection.model_validate(stage_summary(found))
    title, note, _ = next(stage_charts([section]))
    assert title == "preference: loss" and note.startswith(f"The loss of {objective.upper()}, a")


def test_single_answers_are_for_kto_alone(folder: Path) -> None:
    lines(
        folder / "unpaired.jsonl",
        [
            {"prompt": f"{i // 2}?", "completion": "yes" if i % 2 else "nay", "label": i % 2 == 1}
            for i in range(48)
        ],
    )
    text = PREFER.replace("likes.jsonl", "unpaired.jsonl").replace("test_fraction", 'shape = "unpaired"\ntest_fraction')
    with pytest.raises(DataError, match="single answers with a label, and preference learns from pairs"):
        made(text, folder / "store")
    found = made(text, folder / "store", "preference.objective=kto")["preference"]
    assert found.summary["held_out"]["after"]["rewards/margin"] > 0 and "36 answers" in found.summary["headline"]


def test_pairs_without_room_are_counted_and_none_left_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"nothing is left to train; 36 left out: longer than 8 ids"):
        lines(
            folder / "long.jsonl",
            [{"prompt": f"{i:07}?", "chosen": "yes", "rejected": "nay"} for i in range(48)],
        )
        made(PREFER.replace("likes.jsonl", "long.jsonl"), folder / "store", "preference.seq_len=8")


def test_a_stage_that_was_killed_goes_on_to_the_same_bits(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from whorl.train.checkpoint.manager import CheckpointManager

    class Prompt(CheckpointManager):
        def due(self) -> bool:
            super().due()
            return True

        def save(self, *given: object, **options: object) -> float:
            waited = super().save(*given, **options)  # type: ignore[arg-type]
            self.finish()
            if given[0] == 5:
                raise KeyboardInterrupt
            return waited

    whole = made(PREFER, folder / "store")["preference"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("whorl.align.stage.trainer.CheckpointManager", Prompt)
        made(PREFER, tmp_path)
    said: list[str] = []
    monkeypatch.setattr("whorl.tracking.progress.Progress.log", lambda self, text: said.append(text))
    again = made(PREFER, tmp_path, "preference.checkpoint_seconds=3")["preference"]
    assert any("continues at step 5 of 12" in text for text in said)
    kept, expected = weights(again), weights(whole)
    assert all(np.array_equal(kept[name], expected[name]) for name in expected)


def test_a_reward_model_with_its_report_and_as_the_judge(folder: Path) -> None:
    text = (
        REWARD
        + SUMS
        + """
[steps.rl]
parents = ["init_model", "sums", "reward_model"]
steps = 2
prompts_per_step = 2
group_size = 4
max_completion_tokens = 6
max_seq_len = 64
dtype = "float32"
"""
    )
    found = made(text, folder / "store")
    reward, rl = found["reward_model"], found["rl"]
    figures = json.loads((reward.path / "report.json").read_text())
    assert reward.kind == "reward_model" and figures["accuracy"] == reward.summary["held_out"]["accuracy"] == 1.0
    assert {"calibration_error", "reliability", "length"} <= figures.keys()
    assert "right in 100.0%" in reward.summary["headline"] and "nan" not in reward.summary["headline"]
    task = VerifiableTask("t", prompt="7?")
    yes, no = load_reward_verifier(reward.path, "float32")([task, task], ["yes", "nay"])
    assert yes.reward > no.reward and yes.reason.startswith("reward ")
    solved = rl.summary["eval"]
    assert 0 < solved["before"]["reward_model_score"] < 1 and "reward model score" in rl.summary["headline"]
    rewards = [record["reward"] for record in json.loads((rl.path / "curve.json").read_text())]
    assert all(0 < r < 1 for r in rewards)  # those of a reward model: a verifier here gives 0


def test_a_worker_carries_its_judge_through_a_pickle(folder: Path) -> None:
    from whorl.align.data.curriculum import Curriculum
    from whorl.align.rl.rollout import RolloutWorker

    found = made(REWARD, folder / "store")
    model = load_model(found["init_model"].path)
    worker = RolloutWorker(
        model.config, "float32", found["init_model"].path, [VerifiableTask("t", prompt="7?", verifier="unittest")], 2, 4, 16, 1.0,
        Curriculum([0.0]), reward_model=found["reward_model"].path,
    )  # fmt: skip
    worker.setup()
    assert worker._sandbox is None  # nothing is run where a model judges
    sent = pickle.dumps(worker)
    assert len(sent) < 10_000 and pickle.loads(sent).reward_model == found["reward_model"].path


def test_conversations_of_ones_own_are_learnt_as_transcripts(folder: Path) -> None:
    """From Parquet; with an adapter set on the command line, merged into what is kept."""
    talks = [
        [{"role": "user", "content": f"Say {w}."}, {"role": "assistant", "content": w}]
        for w in ("red", "blue", "green", "white") * 6
    ]
    pq.write_table(pa.table({"messages": [*talks, []]}), folder / "talks.parquet")
    text = (
        BEGIN
        + """
[steps.talks]
uses = "tasks"
source = "files"
path = "talks.parquet"
[steps.sft]
parents = ["init_model", "talks"]
seq_len = 64
batch_size = 2
epochs = 30
lr_scale = 1.0
dtype = "float32"
"""
    )
    found = made(text, folder / "store")
    assert found["talks"].summary["quarantine"] == {"accepted": 24, "empty": 1}
    assert found["talks"].summary["counts"] == {"train": 18, "test": 6}
    sft = found["sft"]
    assert sft.summary["texts"] == 18 and sft.summary["final"]["nll"] < 0.7
    adapted = made(text, folder / "store", "sft.lora.rank=4", 'sft.lora.target_modules=["attention.out"]')["sft"]
    before, full, low = (weights(a) for a in (found["init_model"], sft, adapted))
    moved = {name for name in before if not np.array_equal(before[name], low[name])}
    assert len(moved) == 2 and all("attention.out" in name for name in moved)
    assert any(not np.array_equal(before[name], full[name]) for name in before.keys() - moved)
    with pytest.raises(ConfigError, match=r"sft\.lora\.rank cannot be 'many'"):
        made(text, folder / "store", "sft.lora.rank=many")
    with pytest.raises(DataError, match="has texts to learn from, but no tasks"):
        made(
            text.replace("[steps.sft]", '[steps.sft]\nuses = "rl"\nmax_completion_tokens = 8').replace(
                "seq_len = 64\nbatch_size = 2\nepochs = 30\n", ""
            ),
            folder / "store",
        )


def test_tasks_of_a_file_are_for_rewards_and_pairs_for_sft(folder: Path) -> None:
    lines(
        folder / "own.jsonl",
        [{"prompt": f"{i}+1=", "verifier": "numeric", "answer": i + 1} for i in range(8)],
    )
    own = '\n[steps.own]\nuses = "tasks"\nsource = "files"\npath = "own.jsonl"\nshape = "tasks"\n'
    learn = '[steps.sft]\nparents = ["init_model", "own"]\nseq_len = 32\n'
    with pytest.raises(DataError, match="has tasks but no solutions"):
        made(BEGIN + own + learn, folder / "store")
    with pytest.raises(ConfigError, match=r'path goes with source = "files"'):
        made(BEGIN + own.replace('path = "own.jsonl"\n', ""), folder / "store")
    lines(folder / "pairs.jsonl", [{"prompt": f"{i}+1=", "completion": f"{i + 1}"} for i in range(8)])
    pairs = own.replace("own.jsonl", "pairs.jsonl").replace('"tasks"\n', '"pairs"\n', 2)
    pairs = pairs.replace('uses = "pairs"', 'uses = "tasks"')
    assert made(BEGIN + pairs + learn, folder / "store")["sft"].summary["texts"] == 7


def test_align_code_is_a_whole_row() -> None:
    recipe = load_recipe("align-code", sets=["sft.lora.rank=8", "distil.student.n_layers=3"])
    row = ["pretrain", "midtrain", "sft", "preference", "rl", "distil"]
    assert [recipe.steps[b].parents["model"] for b in row[1:]] == row[:-1]
    assert recipe.steps["sft"].config.lora.rank == 8  # type: ignore[attr-defined]
