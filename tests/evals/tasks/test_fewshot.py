"""Few-shot examples drawn as lm-evaluation-harness draws them, conversations, and the settings of generated answers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.evals.backend import FakeBackend
from tests.support.evals.hf_folders import make_folder

from whorl.cli.models.eval_samples import with_samples
from whorl.cli.models.eval_tasks import load_tasks
from whorl.errors import WhorlError
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.endpoint_backend import EndpointBackend
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.options import SampleSettings
from whorl.evals.model.requests import GenerateRequest, Missing, Score, ScoreRequest, responses_of
from whorl.evals.model.response_cache import request_key
from whorl.evals.runner import evaluate
from whorl.evals.tasks.config import parse_task
from whorl.evals.tasks.task import make_task

TEST = [{"id": f"q{i}", "q": f"{i} + 1 =", "a": i + 1} for i in range(6)]
TRAIN = [{"id": f"x{i}", "q": f"{i} + 2 =", "a": i + 2} for i in range(20)]
GENERATE = {
    "name": "sums",
    "kind": "generate",
    "template": "{{ q }}",
    "gold": "a",
    "options": {"metric": "numeric"},
}
CHOICE = {
    "name": "pick", "kind": "choice", "template": "{{ q }}", "choices": ["{{ a }}", "none"], "gold": "0",
    "options": {"prior": False},
}  # fmt: skip
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def task(config: dict[str, Any] = GENERATE, train: Any = TRAIN, **fields: Any) -> EvalTask:
    return make_task(parse_task(config | fields, "t"), TEST, train)


def settings(**fields: Any) -> SampleSettings:
    return SampleSettings(**fields)


def test_examples_are_drawn_for_each_item_by_one_seeded_generator() -> None:
    made, rng = task(num_fewshot=3), random.Random(1234)
    for item in made.items:
        own = rng.sample(TRAIN, 3)
        text = "".join(f"{each['q']} {each['a']}\n\n" for each in own)
        assert made.kind.prompt(item) == text + item.fields["q"]
    first = task(num_fewshot=2, fewshot_sampler="first_n")
    assert first.kind.prompt(first.items[5]) == "0 + 2 = 2\n\n1 + 2 = 3\n\n5 + 1 ="
    hashes = {task(num_fewshot=n).hash for n in (0, 2, 3)} | {first.hash}
    assert len(hashes) == 4 and task().hash == task(num_fewshot=0).hash


def test_one_split_leaves_the_item_out() -> None:
    config, rng = parse_task(GENERATE | {"num_fewshot": 5}, "t"), random.Random(1234)
    made = make_task(config, TEST, TEST, one_split=True)
    for item, record in zip(made.items, TEST, strict=True):
        own = [each for each in rng.sample(TEST, 6) if each != record][:5]
        assert [each.id for each in made.examples_of(item)] == [each["id"] for each in own]


@pytest.mark.parametrize(
    ("fields", "train", "words"),
    [
        ({"num_fewshot": 21}, TRAIN, "21 few-shot examples of 20 records"),
        ({"num_fewshot": 1, "examples": ["x1"]}, TRAIN, "num_fewshot and examples"),
        ({"num_fewshot": 1}, TEST[:1], "'q0' is in the test split"),
    ],
)
def test_impossible_examples_are_refused(fields: dict[str, Any], train: Any, words: str) -> None:
    with pytest.raises(WhorlError, match=words):
        task(train=train, **fields)


def test_num_fewshot_replaces_the_examples_of_a_file(tmp_path: Path) -> None:
    for name, records in (("test", TEST), ("train", TRAIN)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    path = tmp_path / "t.toml"
    path.write_text(
        'name = "t"\nkind = "generate"\ntemplate = "{{ q }}"\ngold = "a"\nexamples = ["x1"]\n'
        'options = { metric = "numeric" }\ndata = { test = "test.jsonl", train = "train.jsonl" }\n'
    )

    def load(n: int | None, *names: str) -> list[EvalTask]:
        given = settings(num_fewshot=n)
        return load_tasks(None, names, None, None, limit=2, documents=tuple, sampling=given)

    sizes = [len(made.examples_of(made.items[0])) for n in (None, 0, 4) for made in load(n, str(path))]
    assert sizes == [1, 0, 4]
    with pytest.raises(WhorlError, match="the task arithmetic has no training records"):
        load(2, "arithmetic")
    path.write_text(path.read_text().replace(', train = "train.jsonl"', ""))
    with pytest.raises(WhorlError, match="--train PATH"):
        load(2, str(path))


def test_conversation_has_a_turn_for_each_example_and_answers_without_delimiter(tmp_path: Path) -> None:
    given = settings(apply_chat_template=True)
    chat = with_samples(task(CHOICE, num_fewshot=1, system="Add."), given)
    request = chat.kind.requests(chat.items[0])[0]
    assert isinstance(request, ScoreRequest) and isinstance(request.context, tuple)
    assert [m["role"] for m in request.context] == ["system", "user", "assistant", "user"]
    assert (request.context[2]["content"], request.continuation) == ("16", "1")
    folder = make_folder(tmp_path / "m", "gpt2")
    (folder / "chat_template.jinja").write_text(CHATML)
    backend = EngineBackend.open(folder)
    [found] = responses_of(backend, [request])
    assert isinstance(found, Score)
    text = "<system>Add.\n<user>14 + 2 =\n<assistant>16\n<user>0 + 1 =\n<assistant>"
    [same] = responses_of(backend, [ScoreRequest(text, "\n1")])  # white space moves to the continuation
    assert isinstance(same, Score) and found.ids == same.ids
    assert found.total == pytest.approx(same.total, abs=1e-5)
    mixed = backend.encoder.encode_pairs([("a", " b"), (request.context, "1"), ("c", " d")])
    assert mixed[1].continuation == list(found.ids) and mixed[0] != mixed[2]
    api = EndpointBackend.open("http://127.0.0.1:9", "m", max_retries=0)
    [missing] = responses_of(api, [request])
    assert isinstance(missing, Missing) and "--tokenizer" in missing.reason


def test_reply_cannot_write_a_special_token(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", "gpt2")
    (folder / "chat_template.jinja").write_text(CHATML)
    encoder = EngineBackend.open(folder).encoder
    name, special = next(iter(encoder.chat.special_ids.items()))
    _, ids = encoder.chat.encode_pair([{"role": "user", "content": "a"}], f"b {name} c")
    assert special not in ids and encoder.tokenizer.decode(ids).decode() == f"\nb {name} c"


def test_whole_texts_have_neither_examples_nor_a_conversation() -> None:
    config = {"name": "text", "kind": "likelihood", "template": "{{ q }}"}
    with pytest.raises(WhorlError, match="scores whole texts"):
        task(config, num_fewshot=2)
    with pytest.raises(WhorlError, match="scores whole texts"):
        with_samples(task(config), settings(apply_chat_template=True))


def test_generation_settings_are_in_the_request_and_in_both_hashes() -> None:
    plain = task()
    text = 'temperature=0.5,top_p=0.9, top_k=7,max_gen_toks=9,until=["a,b", "\\n"],seed=3'
    made = with_samples(plain, settings(gen_kwargs=text))
    [request] = made.kind.requests(made.items[0])
    assert isinstance(request, GenerateRequest) and request.stop == ("a,b", "\n")
    shown = (request.temperature, request.top_p, request.top_k, request.max_tokens)
    assert shown == (0.5, 0.9, 7, 9) and made.config.generation.seed == 3
    keys = {
        request_key("m", each) for each in (request, replace(request, top_k=0), replace(request, top_p=1.0))
    }
    assert len(keys) == 3 and made.hash != plain.hash
    sampled = with_samples(plain, settings(gen_kwargs="do_sample=True"))
    assert sampled.config.generation.temperature == 1.0
    assert with_samples(plain, settings(gen_kwargs="stop=###")).config.generation.stop == ("###",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("temprature=1", r"did you mean 'temperature'"),
        ("0.7", "NAME=VALUE"),
        ("top_p=2", "top_p is wrong: 2"),
        ("temperature=hot", "temperature is wrong: 'hot'"),
        ("do_sample=false,temperature=1", "do_sample is false"),
    ],
)
def test_wrong_generation_settings_are_named(text: str, words: str) -> None:
    with pytest.raises(WhorlError, match=words):
        with_samples(task(), settings(gen_kwargs=text))


def test_note_names_an_item_whose_examples_were_cut() -> None:
    made = task(CHOICE, num_fewshot=3)
    cut = FakeBackend(lambda request: Score((1,), (-1.0,), greedy=True, n_context=90, n_cut=12))
    (note,) = (each for each in evaluate(cut, [made])[0].notes if "exceed" in each)
    assert "6 of 6 contexts exceed the window of 100 positions" in note
    assert "'q0' lost 12 tokens" in note and "--num-fewshot" in note
