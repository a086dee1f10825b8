"""Tasks in the files of lm-evaluation-harness, which both sides read, and small models in folders of `transformers`.

    write_tasks(folder, n_items)       five tasks over the documentation that Python's standard library carries
    write_model(folder, kind)          a small trained Llama with a tokenizer of a kind

Sentences of the documentation give contexts, the rest of a sentence is the true continuation, and the rests of other
sentences are the false ones. Some items have accents, other scripts, white space at borders, or an empty context.
"""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

CHOICES = 4
MARKS = ("naïve café", "Grüße aus Köln", "数据模型", "Привет, мир", "😀 ok", "  two  spaces", "tab\there")
TASK = {
    "dataset_path": "json", "test_split": "test", "doc_to_text": "{{context}}", "metadata": {"version": 1},
}  # fmt: skip
EXAMPLES = {"training_split": "train", "num_fewshot": 5, "fewshot_config": {"sampler": "first_n"}}


def mean_of(*names: str) -> list[dict[str, Any]]:
    """Return a metric list of means."""
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]


CHOICE = {
    "output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
    "metric_list": mean_of("acc", "acc_norm"),
}  # fmt: skip
TASKS: dict[str, dict[str, Any]] = {
    "choice": CHOICE,
    "choice_shots": {**CHOICE, **EXAMPLES},
    "last_word": {
        "output_type": "loglikelihood", "doc_to_target": " {{target}}",
        "metric_list": [*mean_of("acc"), {"metric": "perplexity", "aggregation": "perplexity", "higher_is_better": False}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
    "answer": {
        "output_type": "generate_until", "doc_to_target": "{{answer}}", "metric_list": mean_of("exact_match"),
        "filter_list": [{"name": "text", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 12, "do_sample": False},
    },
}  # fmt: skip


def sentences() -> list[str]:
    """Return the sentences of Python's documentation of its language, 40 to 240 characters each."""
    from pydoc_data.topics import topics

    words = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    found = re.split(r"(?<=[.:;]) (?=[A-Z])", words)
    return list(dict.fromkeys(text for text in found if 40 <= len(text) <= 240))


def choice_items(n_items: int, seed: int, n_sentences: int = 1) -> list[dict[str, Any]]:
    """Return items with a context of `n_sentences` and a part of one more, and four continuations."""
    rng, texts, items = random.Random(seed), sentences(), []
    for number in range(n_items):
        before = " ".join(rng.choice(texts) for _ in range(n_sentences - 1))
        parts = [rng.choice(texts).split() for _ in range(CHOICES)]
        cut = [rng.randint(3, max(3, len(words) // 2)) for words in parts]
        rests = list(dict.fromkeys(" ".join(words[k:]) for words, k in zip(parts, cut, strict=True)))
        while len(rests) < CHOICES:
            rests.append(f"{rests[0]} {len(rests)}")
        true, context = rests[0], " ".join([*([before] if before else []), *parts[0][: cut[0]]])
        if number % 8 == 0:
            context = f"{rng.choice(MARKS)} {context}"
            rests[-1] += f" {rng.choice(MARKS)}"
        if number % 16 == 5:
            context += rng.choice([" ", "\n", "  "])
        rng.shuffle(rests)
        items.append(
            {"id": f"{seed}-{number}", "context": context, "choices": rests, "label": rests.index(true)}
        )
    return items


def write_tasks(
    folder: Path, n_items: int, *, names: tuple[str, ...] = tuple(TASKS), n_sentences: int = 1
) -> Path:
    """Write tasks and their data."""
    folder.mkdir(parents=True, exist_ok=True)
    items, examples = choice_items(n_items, 0, n_sentences), choice_items(5, 1, n_sentences)
    words = [{"id": i["id"], "context": " ".join(w[:-1]), "target": w[-1]} for i in items
             if len(w := f"{i['context'].strip()} {i['choices'][i['label']]}".split()) > 3]  # fmt: skip
    words[0] |= {"context": ""}
    texts, rng = sentences(), random.Random(2)
    documents = [
        {"id": f"t{n}", "text": " ".join(rng.choices(texts, k=1 + n % 40))}
        for n in range(max(8, n_items // 8))
    ]
    answers = [
        {"id": i["id"], "context": i["context"].strip(), "answer": "none"}
        for i in items[: max(8, n_items // 4)]
    ]
    data = {
        "choice": items,
        "choice_shots": items,
        "last_word": words,
        "rolling": documents,
        "answer": answers,
    }
    for name in names:
        write_data(folder / f"{name}.jsonl", data[name])
        write_data(folder / "examples.jsonl", examples)
        files = {"test": str(folder / f"{name}.jsonl"), "train": str(folder / "examples.jsonl")}
        if "num_fewshot" not in TASKS[name]:
            del files["train"]
        task = {"task": f"whorl_{name}", **TASK, "dataset_kwargs": {"data_files": files}, **TASKS[name]}
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # JSON is YAML
    return folder


def write_data(path: Path, records: list[dict[str, Any]]) -> None:
    """Write JSON lines."""
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def write_model(
    folder: Path, kind: str, *, steps: int, d_model: int = 128, n_layers: int = 2, length: int = 512,
    texts: list[str] | None = None, row: int = 96,
) -> Path:  # fmt: skip
    """Write a Llama of `transformers` with a tokenizer, trained for `steps`; an existing one is kept.

    texts: default the sentences. row: ids of a training row.
    """
    import torch
    from tests.support.evals.hf_folders import write_tokenizer
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return folder
    texts = texts or sentences()
    size = write_tokenizer(folder, kind, texts, vocab_size=4096)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = LlamaConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        vocab_size=size, hidden_size=d_model, intermediate_size=3 * d_model, num_hidden_layers=n_layers,
        num_attention_heads=d_model // 32, num_key_value_heads=d_model // 64, max_position_embeddings=length,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    if steps:
        ids = tokenizer(" ".join(texts), return_tensors="pt").input_ids[0]
        optimizer, rng = torch.optim.AdamW(model.parameters(), 2e-3), torch.Generator().manual_seed(0)
        for _ in range(steps):
            starts = torch.randint(len(ids) - row - 1, (8,), generator=rng)
            batch = torch.stack([ids[s : s + row] for s in starts.tolist()])
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
