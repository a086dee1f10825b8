"""`--num-fewshot`, `--apply-chat-template` and `--gen-kwargs` against lm-evaluation-harness, item by item.

    python bench/evals/harness/fewshot_parity.py --peer lmeval=PYTHON --save         about 5 minutes
    python bench/evals/harness/fewshot_parity.py --peer lmeval=PYTHON --quick        a fifth of the items

Three tasks in files of the harness, over public data: choices (logical deduction of BIG-Bench Hard, in ARC's form), last
words (of GSM8K's questions, in LAMBADA's form) and generated answers (GSM8K, its final number). Both sides read the same
files and one folder of `transformers`: a small Llama with a chat template, trained on all records, so that some items are
right. Five examples come from the training records: drawn for each item (the harness's default), as a conversation, and the
first five.

Bars: every item has the same scores (acc, acc_norm, exact_match), the same text is generated, and every log-likelihood is
within 5e-4 nats. A choice whose best two differ by less than that counts as a tie.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from bench._peers import environment, interpreters
from bench._run import claim, data_path, parse, skip
from bench.evals.harness._tasks import TASK, mean_of, write_data, write_model

from whorl.cli.models.eval_tasks import load_tasks
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.options import SampleSettings
from whorl.evals.results import ItemResult
from whorl.evals.runner import evaluate

N_EXAMPLES, N_TRAIN, LARGEST, LENGTH = 5, 100, 5e-4, 2048
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
SPLITS = {"training_split": "train", "fewshot_split": "train"}
STRIP = [{"name": "text", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}]
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}", "metric_list": mean_of("acc", "acc_norm"),
    },
    "last_word": {
        "output_type": "loglikelihood", "doc_to_text": "{{question.split(' ')[:-1]|join(' ')}}",
        "doc_to_target": "{{' '+question.split(' ')[-1]}}", "metric_list": mean_of("acc"),
    },
    "answer": {
        "output_type": "generate_until", "doc_to_text": "Question: {{question}}\nAnswer:", "description": "Solve it.\n",
        "doc_to_target": "{{answer.split('#### ')[-1]}}", "metric_list": mean_of("exact_match"), "filter_list": STRIP,
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 32, "do_sample": False},
    },
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {  # of the harness; first_n is a key of the task
    "drawn": {"num_fewshot": N_EXAMPLES, "gen_kwargs": {"max_gen_toks": 6, "until": ["\n", "."]}},
    "conversation": {"num_fewshot": N_EXAMPLES, "apply_chat_template": True, "fewshot_as_multiturn": True},
    "first_n": {"num_fewshot": N_EXAMPLES},
}
METRICS = {"acc": "acc", "acc_norm": "acc_norm", "exact_match": "exact_strict"}


def records(n_items: int) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Return the test and training records of each task."""
    bbh = data_path("bbh", "https://github.com/suzgunmirac/BIG-Bench-Hard")
    choices = []
    for example in json.loads((bbh / "logical_deduction_three_objects.json").read_text())["examples"]:
        question, _, options = example["input"].partition("\nOptions:\n")
        texts = [re.sub(r"^\([A-Z]\) ", "", line) for line in options.splitlines()]
        choices.append(
            {"question": question, "choices": texts, "label": ord(example["target"][1]) - ord("A")}
        )
    words = []
    for split in ("test", "train"):
        path = data_path(f"gsm8k_{split}.jsonl", "https://github.com/openai/grade-school-math")
        words.append([json.loads(line) for line in path.read_text("utf-8").splitlines()])
    gsm8k = words[0][:n_items], words[1][:N_TRAIN]
    test = [
        each
        for each in choices[N_TRAIN:]
        if each["question"] not in {c["question"] for c in choices[:N_TRAIN]}
    ]
    return {"choice": (test[:n_items], choices[:N_TRAIN]), "last_word": gsm8k, "answer": gsm8k}


def training_texts(made: dict[str, Any]) -> list[str]:
    """Return all records in the form of the prompts."""
    pairs = [(r["question"], r["choices"][r["label"]]) for split in made["choice"] for r in split]
    pairs += [(r["question"], r["answer"].split("#### ")[-1]) for split in made["answer"] for r in split]
    random.Random(0).shuffle(pairs)
    return [f"Question: {question}\nAnswer: {answer}\n\n" for question, answer in pairs]


def write_tasks(folder: Path, made: dict[str, Any], setting: str) -> Path:
    """Write the tasks of one setting, and their data."""
    folder.mkdir(parents=True)
    for name, (test, train) in made.items():
        files = {split: str(folder / f"{name}-{split}.jsonl") for split in ("test", "train")}
        write_data(Path(files["test"]), test)
        write_data(Path(files["train"]), train)
        sampler = {"fewshot_config": {"sampler": "first_n"}} if setting == "first_n" else {}
        task = {**TASK, **SPLITS, **TASKS[name], **sampler, "task": f"whorl_{name}"}
        (folder / f"{name}.yaml").write_text(json.dumps({**task, "dataset_kwargs": {"data_files": files}}))
    return folder


def run_harness(python: str, model: Path, tasks: Path, setting: str) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of each task, in order."""
    local = {
        "pretrained": str(model),
        "dtype": "float32",
        "batch_size": 8,
        "device": "cpu",
        "logits_cache": False,
    }
    job = {"side": "hf", "arguments": local, "tasks": str(tasks), "names": list(TASKS), "rounds": 1,
           "options": SETTINGS[setting]}  # fmt: skip
    path = tasks / "job.json"
    path.write_text(json.dumps(job))
    command = [python, str(Path(__file__).with_name("_peer.py")), str(path)]
    extra = {"HF_DATASETS_CACHE": str(tasks / "cache"), "PYTHONPATH": ""}
    ended = subprocess.run(
        command, env=environment(python, 2) | extra, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if ended.returncode:
        sys.exit(f"{setting}: {ended.stderr.decode()[-2000:]}")
    samples = json.loads(path.with_suffix(".out").read_text())["samples"]
    return {name: samples[f"whorl_{name}"] for name in TASKS}


def run_ours(model: Path, tasks: Path, setting: str) -> dict[str, tuple[EvalTask, tuple[ItemResult, ...]]]:
    """Return each task with its results, as `whorl eval` computes them."""
    given = SETTINGS[setting]
    kwargs = ",".join(f"{name}={json.dumps(value)}" for name, value in given.get("gen_kwargs", {}).items())
    sampling = SampleSettings(
        num_fewshot=given["num_fewshot"],
        apply_chat_template=given.get("apply_chat_template", False),
        gen_kwargs=kwargs,
    )
    paths = [str(tasks / f"{name}.yaml") for name in TASKS]
    loaded = load_tasks(None, paths, None, None, limit=None, documents=tuple, sampling=sampling)
    results = evaluate(EngineBackend.open(model), loaded)
    pairs = zip(TASKS, loaded, results, strict=True)
    return {name: (task, result.items) for name, task, result in pairs}


def compare(
    name: str, task: EvalTask, ours: tuple[ItemResult, ...], theirs: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return counts of items that differ, and the largest difference of a log-likelihood."""
    out = {"task": name, "items": len(ours), "prompts_differ": 0, "scores_differ": 0, "texts_differ": 0, "ties": 0,
           "largest": 0.0, "right": sum(each.outcome == "right" for each in ours)}  # fmt: skip
    assert len(ours) == len(theirs)
    for item, mine, peer in zip(task.items, ours, theirs, strict=True):
        differ = any(abs(peer[key] - mine.scores[own]) > 0 for key, own in METRICS.items() if key in peer)
        if isinstance(prompt := task.kind.prompt(item), str):
            out["prompts_differ"] += prompt != peer["arguments"][0][0]
        if name == "answer":
            out["texts_differ"] += mine.answers[0].strip() != peer["answers"][0][0].strip()
        else:
            values = [float(each[0][0]) for each in peer["answers"]]
            own = (
                [c["log_prob"] for c in mine.details["choices"]]
                if name == "choice"
                else [-mine.scores["item_perplexity"]]
            )
            out["largest"] = max([out["largest"], *(abs(a - b) for a, b in zip(own, values, strict=True))])
            if name == "choice":
                lengths = [1.0] * len(values), [float(len(text)) for text in item.choices]
                best = [sorted(v / n for v, n in zip(values, each, strict=True))[-2:] for each in lengths]
                tie = any(b - a < LARGEST / max(n) for (a, b), n in zip(best, lengths, strict=True))
                out["ties"] += tie
                differ = differ and not tie
        out["scores_differ"] += differ
    return out


def main() -> None:
    """Compare all settings and print the claim."""
    a = parse(
        __doc__, lambda p: p.add_argument("--peer", action="append", default=[]), smoke={"n": 6, "steps": 5},
        quick={"n": 30, "steps": 150},
    )  # fmt: skip
    pythons = interpreters(a.peer, ("lmeval",), 2)
    if "lmeval" not in pythons:
        skip("needs lm-evaluation-harness (--peer lmeval=PYTHON)")
    made, found = records(getattr(a, "n", 150)), []
    with tempfile.TemporaryDirectory() as temporary:
        folder, texts = Path(temporary), training_texts(made)
        model = write_model(
            folder / "model", "gpt2", steps=getattr(a, "steps", 600), length=LENGTH, texts=texts, row=256
        )
        (model / "chat_template.jinja").write_text(TEMPLATE)
        for setting in SETTINGS:
            tasks = write_tasks(folder / setting, made, setting)
            theirs, ours = (
                run_harness(pythons["lmeval"], model, tasks, setting),
                run_ours(model, tasks, setting),
            )
            for name in TASKS:
                found.append({"setting": setting, **compare(name, *ours[name], theirs[name])})
                print(json.dumps(found[-1]), flush=True)
    wrong = sum(value for each in found for name, value in each.items() if name.endswith("_differ"))
    largest = max(each["largest"] for each in found)
    items = sum(each["items"] for each in found)
    claim(
        f"{items:,} items of three tasks with {N_EXAMPLES} examples (drawn, as a conversation, first): scores, prompts and "
        "texts that differ from lm-evaluation-harness",
        ours=float(wrong), peer=0.0, unit="items", ratio=float(wrong), bar=0.0, ok=not wrong and largest <= LARGEST,
        samples=found, quick=getattr(a, "quick", False), peer_name="lm-evaluation-harness, hf",
    )  # fmt: skip


if __name__ == "__main__":
    main()
