"""The recipe `flywheel` on a synthetic log: events, preferences from feedback, training, comparison, lineage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.loop_events import append, comparisons, completion, open_synthetic_log
from tests.support.recipes.align_recipes import INIT_MODEL
from tests.support.recipes.align_steps import run_text
from typer.testing import CliRunner

from whorl.align.data.dataset_files import read_preferences
from whorl.cli import build_app
from whorl.errors import ConfigError, DataError
from whorl.log import open_log
from whorl.loop import promotion
from whorl.loop.actor_keys import ActorKeys
from whorl.loop.events import FeedbackGiven, create_topics
from whorl.loop.gate import figures
from whorl.recipes import load_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tokens.hf_tokenizer import load_tokenizer
from whorl.tracking.progress import Progress

SETTINGS = ("preference.lr_scale=0.3", "preference.data.seq_len=16", "preference.data.batch_size=12",
            "preference.data.epochs=4", 'preference.model.dtype="float32"')  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Artifact]:
    """The served model, in `store` of the working directory, and the log of 60 comparisons of its answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("flywheel"))
        patch.delenv("WHORL_LOG", raising=False)
        found = run_text(INIT_MODEL)["init_model"]
        log, keys = open_synthetic_log(Path("store").absolute())
        append(log, keys, *comparisons(found.address, 60))
        log.close()
        yield found


def run(*sets: str, model: str = "") -> dict[str, Artifact]:
    recipe = load_recipe("flywheel", sets=[*SETTINGS, *sets], model=model)
    return dict(run_recipe(recipe, Store(Path("store")), Progress.silent()).artifacts)


def test_flywheel_trains_on_logged_ids_and_compares(base: Artifact) -> None:
    found = run()
    assert found["events"].summary["completions"] == 120 and found["events"].summary["feedback"] == {
        "better": 60
    }
    pairs = read_preferences(found["preferences"].path, "train")
    assert pairs[0].chosen_ids[-1] == 257 and bytes(pairs[0].prompt_ids[1:]).decode() == pairs[0].prompt
    assert found["preference"].parents["model"] == base.address
    assert found["preference"].summary["objective"] == "dpo"
    result = json.loads(found["compare"].file("comparison.json").read_text())
    assert result["verdict"] == "better" and result["measures"]["held-out pairs"]["low"] > 0.5
    assert "the new model is better" in found["compare"].summary["headline"]
    assert "Is the next model better?" in found["report"].file("report.html").read_text()
    lineage = json.dumps(Store(Path("store")).lineage(found["preference"]))
    assert found["events"].address in lineage
    assert found["events"].file("actors.txt").read_text().split() == ["ada", *(f"rater{i}" for i in range(7))]


def test_without_new_events_the_flywheel_is_a_lookup_and_new_ones_are_a_new_artifact() -> None:
    before = run()["events"].address
    assert run()["events"].address == before
    log, keys = open_synthetic_log(Path("store").absolute())
    append(log, keys, FeedbackGiven("late", "c0-0-a", "like"), start=1000)
    log.close()
    assert run()["events"].address != before


def promote(*arguments: str) -> str:
    result = CliRunner().invoke(build_app(), ["promote", *arguments, "--store", "store"])
    return f"{result.exit_code} {result.output}{result.stderr}"


def test_promotion_needs_evidence_moves_the_name_and_returns(base: Artifact) -> None:
    store = Store(Path("store"))
    assert "has no artifact 'nothing/here'" in promote("nothing/here")
    assert "1 whorl: no blind vote and no comparison has " in promote("init_model", "--name", "other")
    trained = run()["preference"]
    assert promote("flywheel/preference").startswith("0 no blind votes; by the step compare, held-out pairs ")
    assert (
        store.names()["served/m"] == trained.address and store.open("preference").address == trained.address
    )
    assert "is served as m already" in promote("flywheel/preference")
    assert promote("--rollback") == f"0 served/m is {base.label} again\n"
    assert store.names()["served/m"] == base.address and store.names()["served-before/m"] == trained.address
    assert "nothing was promoted as 'x'" in promote("--rollback", "--name", "x")


def test_blind_votes_decide_before_the_comparison(base: Artifact) -> None:
    trained = run()["preference"]
    log, keys = open_synthetic_log(Path("store").absolute())
    for n in range(12):
        for arm, side, digest in (
            ("champion", "left", base.address),
            ("challenger", "right", trained.address),
        ):
            append(
                log, keys, completion(f"{arm}{n}", "1?", arm, arm=arm, side=side, pair=f"p{n}", digest=digest)
            )
        vote = FeedbackGiven(f"r{n}", f"champion{n}", "better", over=f"challenger{n}")
        append(log, keys, vote, start=3000 + n)
    log.close()
    text = promote("flywheel/preference")
    assert text.startswith("1 ") and "0 blind votes for it, 12 against, 0 ties: win rate 0.0%" in text


def test_a_challenger_with_another_tokenizer_is_refused(base: Artifact) -> None:
    store = Store(Path("store"))
    other = run_text(INIT_MODEL, "init_model.seed=7")["init_model"]
    found = load_tokenizer(other.path)
    found.token_bytes[65], found.token_bytes[66] = found.token_bytes[66], found.token_bytes[65]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            promotion, "load_tokenizer", lambda path: found if path == other.path else load_tokenizer(path)
        )
        tests = [{"champion": base.address, "challenger": other.address, **figures(90, 10)}]
        with pytest.raises(ConfigError, match="has another tokenizer than"):
            promotion.promote(store, other, "n", tests)
        found.token_bytes[65], found.token_bytes[66] = found.token_bytes[66], found.token_bytes[65]
        assert "win rate 90.0%" in promotion.promote(store, other, "n", tests)


def test_logs_without_a_usable_pair_say_what_to_do(base: Artifact, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no topic 'completions'(?s:.*)whorl serve MODEL --log"):
        run(f"events.log=sqlite:{tmp_path}/empty.db", model=base.name)
    log = open_log(f"sqlite:{tmp_path}/few.db")
    create_topics(log)
    keys = ActorKeys(Path("store/log/keys.db"))
    append(log, keys, completion("a", "1?", "yes", digest=base.address))
    with pytest.raises(DataError, match="has no feedback on them"):
        run(f"events.log={log.url}")
    append(log, keys, FeedbackGiven("bob", "a", "like"), start=1)
    with pytest.raises(
        DataError, match=r"no single answers with a label to .*: 0 pairs, 1 single answers(?s:.*)collect"
    ):
        run(f"events.log={log.url}")


def test_thumbs_alone_train_kto(base: Artifact, tmp_path: Path) -> None:
    log = open_log(f"sqlite:{tmp_path}/thumbs.db")
    create_topics(log)
    keys, events = ActorKeys(Path("store/log/keys.db")), list[Any]()
    for n in range(60):
        good = n % 2 == 0
        events.append(completion(f"t{n}", f"{n}?", "yes" if good else "nay", digest=base.address))
        events.append(FeedbackGiven(f"r{n % 5}", f"t{n}", "like" if good else "dislike"))
    append(log, keys, *events)
    found = run(f"events.log={log.url}")
    assert found["preference"].summary["objective"] == "kto" and found["preferences"].summary["singles"] == 60
    assert found["compare"].summary["verdict"] == "better"
    assert found["compare"].summary["measure"] == "liked over disliked"


def test_thumbs_that_give_few_pairs_are_all_compared_on(base: Artifact, tmp_path: Path) -> None:
    log = open_log(f"sqlite:{tmp_path}/both.db")
    create_topics(log)
    keys, events = ActorKeys(Path("store/log/keys.db")), list[Any]()
    for n in range(60):
        for good in (True, False) if n % 3 == 0 else (n % 2 == 0,):
            name = f"t{n}-{good}"
            events.append(completion(name, f"{n}?", "yes" if good else "nay", digest=base.address))
            events.append(FeedbackGiven(f"r{n % 5}", name, "like" if good else "dislike"))
    append(log, keys, *events)
    found = run(f"events.log={log.url}")
    pairs, thumbs = (
        found["compare"].summary["measures"][m]["n"] for m in ("held-out pairs", "liked over disliked")
    )
    assert found["preference"].summary["objective"] == "dpo" and thumbs > 2 * pairs > 0
    assert found["compare"].summary["measure"] == "liked over disliked"
    assert found["compare"].summary["verdict"] == "better"
