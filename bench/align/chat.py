"""Conversations with a checkable rule: is it kept on held-out prompts, and do other programs give the same answers?

    whorl run quickstart --until pretrain
    python bench/align/chat.py                      # five seeds of each model
    python bench/align/chat.py --only quickstart --seeds 1

500 conversations teach three rules at once: every answer ends with a signature, the colour that a user has named is
repeated a turn later, and one topic is refused. Held-out prompts have names, things and topics in combinations that do
not occur in training. The recipe `chat` trains them with its defaults, from two models:

    quickstart   the model of `whorl run quickstart`, without a chat template
    qwen         a small Qwen3 of `transformers` with its own chat template, pretrained by `whorl run continue`

A prompt counts if the greedy answer keeps the rule. Then the model of the first seed is exported for `transformers`, and
as GGUF, and 20 greedy answers are compared with those of Whorl's engine, text by text; llama.cpp is compared if
llama-cpp-python is installed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, quickstart_store, sized

import whorl
from whorl.recipes import load_recipe, run_recipe
from whorl.store import Artifact, Store
from whorl.tracking.progress import Progress

NAMES = [
    "Ada",
    "Ben",
    "Cleo",
    "Dan",
    "Eve",
    "Finn",
    "Gus",
    "Hal",
    "Ivy",
    "Jon",
    "Kim",
    "Leo",
    "Mia",
    "Ned",
    "Ola",
    "Pam",
]
THINGS = ["bike", "hat", "boat", "door", "cup", "coat", "kite", "lamp"]
COLOURS = ["red", "blue", "green", "white", "black", "pink", "gold", "grey"]
TOPICS = ["music", "food", "books", "trains", "birds", "films", "maps", "games"]
REFUSED, SIGNATURE, BAR = "weather", "~ Otter", 0.9
COMPARED = 20  # answers that other programs give, too
WORK = sized((500, 90), (40, 6))  # conversations, held-out prompts
Talk = tuple[list[dict[str, str]], str]  # messages before the answer, the answer


def talks(n: int, seed: int, held_out: bool) -> list[Talk]:
    """Return `n` conversations, a third of each rule; held-out ones have other combinations than the rest."""
    draw, found = random.Random(seed), list[Talk]()
    while len(found) < n:
        name, thing, colour, topic = map(draw.choice, (NAMES, THINGS, COLOURS, TOPICS))
        if ((NAMES.index(name) + THINGS.index(thing) + TOPICS.index(topic)) % 5 == 0) != held_out:
            continue
        say = {
            0: ([("user", f"I am {name}. My {thing} is {colour}."), ("assistant", f"Noted, {name}. {SIGNATURE}"),
                 ("user", f"What colour is my {thing}?")], f"Your {thing} is {colour}. {SIGNATURE}"),
            1: ([("user", f"{name} here. Do you like {topic}?")], f"Yes, {name}, I like {topic}. {SIGNATURE}"),
            2: ([("user", f"{name} here. How is the {REFUSED} at the {thing}?")],
                f"I do not talk about the {REFUSED}. {SIGNATURE}"),
        }[len(found) % 3]  # fmt: skip
        found.append(([{"role": role, "content": text} for role, text in say[0]], say[1]))
    return found


def run(store: Store, recipe: str, model: str, *sets: str) -> Artifact:
    """Run a recipe from a model and return that of its last training step."""
    loaded = load_recipe(recipe, sets=sets, model=model)
    found = run_recipe(loaded, store, Progress.silent()).artifacts
    return found["sft" if recipe == "chat" else "continue"]


def answers(folder: Path, prompts: list[Talk]) -> list[str]:
    """Return the greedy answers of Whorl's engine."""
    model = whorl.load(str(folder))
    return [model.chat(messages, temperature=0.0, max_tokens=32).strip() for messages, _ in prompts]


def qwen_folder(store: Store, base: Path, folder: Path) -> Path:
    """Return the folder of a small Qwen3 with the tokenizer of `base`, pretrained on the corpus of the quickstart."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from whorl.align.stage.chat_format import chat_files
    from whorl.tokens.hf_tokenizer import load_tokenizer

    chat_files(base, folder)
    tokenizer = load_tokenizer(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=tokenizer.vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=4, head_dim=64,
        num_attention_heads=3, num_key_value_heads=3, max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    sets = ("continue.data.seq_len=256", f"continue.data.epochs={sized(0.6, 0.002)}", "continue.lr_scale=1")
    made = run(store, "continue", str(folder), 'ingest.sources=["python-stdlib"]', *sets)
    return made.path


def hf_answers(folder: Path, prompts: list[Talk]) -> list[str]:
    """Return the greedy answers of `transformers` of an exported folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    found = []
    for messages, _ in prompts:
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        out = model.generate(**ids, max_new_tokens=32, do_sample=False)
        found.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


def llama_cpp_answers(file: Path, prompts: list[Talk]) -> list[str]:
    """Return the greedy answers of llama.cpp of a GGUF file."""
    from llama_cpp import Llama

    model = Llama(str(file), n_ctx=512, verbose=False)
    found = []
    for messages, _ in prompts:
        done: Any = model.create_chat_completion(messages, temperature=0.0, max_tokens=32)  # type: ignore[arg-type]
        found.append(done["choices"][0]["message"]["content"].strip())
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", choices=("", "quickstart", "qwen"), default="")
        parser.add_argument("--store", help="with quickstart/pretrain")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "only": "quickstart"})
    base = quickstart_store(args.store).open("quickstart/pretrain").path
    with tempfile.TemporaryDirectory() as name:
        folder, store = Path(name), Store(Path(name) / "store")
        train, held_out = talks(WORK[0], 0, False), talks(WORK[1], 1, True)
        with (folder / "talks.jsonl").open("w") as file:
            for messages, answer in train:
                file.write(
                    json.dumps({"messages": [*messages, {"role": "assistant", "content": answer}]}) + "\n"
                )
        for kind in ("quickstart", "qwen"):
            if args.only not in ("", kind):
                continue
            model = base if kind == "quickstart" else qwen_folder(store, base, folder / "qwen")
            kept = []
            for seed in range(args.seeds):
                sets = [
                    f"data.path={folder / 'talks.jsonl'}",
                    f"sft.seed={seed}",
                    "sft.max_completion_tokens=32",
                ]
                made = run(store, "chat", str(model), *sets, "sft.data.seq_len=256")
                said = answers(made.path, held_out)
                kept.append(
                    statistics.fmean(a == right for a, (_, right) in zip(said, held_out, strict=True))
                )
                print(f"{kind}, seed {seed}: {kept[-1]:.3f}; {made.summary['headline']}", flush=True)
                if seed == 0:
                    first = made
            mean = statistics.fmean(kept)
            claim(
                f"chat of {kind}: held-out prompts on which the rule is kept, the least of the seeds", ours=min(kept),
                peer=1.0, unit="share", ratio=mean, bar=BAR, ok=min(kept) >= BAR, variant=kind, samples=kept,
            )  # fmt: skip
            compare(kind, first, held_out[:COMPARED], folder, store)


def compare(kind: str, made: Artifact, prompts: list[Talk], folder: Path, store: Store) -> None:
    """Compare the answers of exported models with those of Whorl's engine."""
    ours = answers(made.path, prompts)
    targets = {"transformers": (folder / f"{kind}-hf", "hf", hf_answers)}
    if find_spec("llama_cpp") is not None and kind == "qwen":
        targets["llama.cpp"] = (folder / f"{kind}.gguf", "gguf", llama_cpp_answers)
    for name, (target, to, ask) in targets.items():
        command = [sys.executable, "-m", "whorl.cli", "export", made.address, str(target), "--to", to]
        subprocess.run([*command, "--store", str(store.root)], check=True)
        theirs = ask(target, prompts)
        equal = statistics.fmean(a == b for a, b in zip(ours, theirs, strict=True))
        claim(
            f"chat of {kind}: greedy answers of {name} that are equal to those of Whorl", ours=equal, peer=1.0, unit="share",
            ratio=equal, bar=1.0, ok=equal == 1.0, peer_name=name, variant=f"{kind}-{to}",
        )  # fmt: skip


if __name__ == "__main__":
    main()
