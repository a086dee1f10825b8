"""Folders in, folders out: what every stage reads and what it leaves behind.

A stage is handed the folder of a model (weights, tokenizer, chat template) and leaves another like it, so that stages follow
each other in any order, and each can be served, sampled from and measured. What a stage learns from is a folder too: JSON
lines, written by `sets.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from whorl.align.config import StageConfig
from whorl.align.data.formats import PromptCompletion
from whorl.align.data.quarantine import Quarantine
from whorl.align.data.read import pairs, tasks
from whorl.align.model.example import ExampleTokenizer
from whorl.align.model.policy_model import PolicyModel
from whorl.align.model.sampling import banned_ids, rollout_engine, sample_completions
from whorl.engine.sampling_params import SamplingParams
from whorl.evals.verify import verify_all
from whorl.evals.verify.task import Verdict, VerifiableTask
from whorl.machine.device_probe import Machine
from whorl.models import LanguageModel, load_model, save_model
from whorl.models.lora import load_lora, merge_lora, save_lora
from whorl.sandbox import Sandbox
from whorl.tokens.chat import load_chat_template
from whorl.tokens.hf_tokenizer import load_tokenizer

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
)
ADAPTER = "adapter"


def load_example_tokenizer(folder: Path) -> ExampleTokenizer:
    """The scribe of a model's tokenizer and chat template."""
    tokenizer = load_tokenizer(folder)
    return ExampleTokenizer(tokenizer, load_chat_template(folder, tokenizer))


def load_stage_model(folder: Path, config: StageConfig, machine: Machine) -> LanguageModel:
    """The model of a folder, to be trained: on the machine's device, computing in what is fastest there (or in what
    `config` says). What a stage adds to it (an adapter, a critic, moments, an engine that samples) lies there too.

    An adapter that a stage before left beside its model (`lora.merge = false`) is merged.
    """
    dtype = machine.torch_dtype if config.dtype is None else getattr(torch, config.dtype)
    model = load_model(folder, dtype, machine.device, to_train=True)
    if (folder / ADAPTER).is_dir():
        merge_lora(model, load_lora(folder / ADAPTER, model))
    return model


def make_policy_model(
    model: LanguageModel,
    example_tokenizer: ExampleTokenizer,
    config: StageConfig,
    *,
    context_hint: int,
    temperature: float = 1.0,
    critic: bool = False,
) -> PolicyModel:
    """A model as a stage trains it: judged over what can be sampled, its rows read as an engine of `room` positions does."""
    model.context_hint = context_hint
    out = banned_ids(example_tokenizer, model.config.vocab_size, len(example_tokenizer.tokenizer.token_bytes))
    return PolicyModel(
        model, temperature=temperature, banned_ids=out, lora=config.lora, critic=critic, seed=config.seed
    )


def save_stage_model(network: PolicyModel, base: Path, out: Path) -> None:
    """Writes the folder of the model that came out; an adapter merged, or beside the model that it is for."""
    lora = network.lora
    network.requires_grad_(False)
    if lora is not None and lora.merge:
        merge_lora(network.model, network.adapter())
    save_model(network.model, out)
    if lora is not None and not lora.merge:
        save_lora(network.adapter(), out / ADAPTER, base=base.name)
    for name in COPIED_FILES:
        if (base / name).is_file() and not (out / name).exists():
            shutil.copyfile(base / name, out / name)


def read_tasks(folder: Path, split: str) -> list[VerifiableTask]:
    """Those that a step wrote (`sets.py`); none where there is no file."""
    path = folder / f"tasks.{split}.jsonl"
    return list(tasks(path, Quarantine())) if path.is_file() else []


def read_prompt_completions(folder: Path, split: str) -> list[PromptCompletion]:
    """As `read_tasks`."""
    path = folder / f"pairs.{split}.jsonl"
    return list(pairs(path, Quarantine())) if path.is_file() else []


def evaluate_tasks(
    network: PolicyModel,
    example_tokenizer: ExampleTokenizer,
    eval_tasks: Sequence[VerifiableTask],
    *,
    max_tokens: int,
    length: int,
    samples: int = 1,
    temperature: float | None = None,
    seed: int = 0,
    sandbox: Sandbox | None = None,
) -> tuple[list[str], list[Verdict]]:
    """(answers, verdicts) of `samples` answers to each task, one task after the other, by the weights as they are now.

    temperature: None takes the likeliest tokens.
    """
    engine = rollout_engine(network.eval_copy(), example_tokenizer, sequences=64, max_length=length)
    prompts = [
        example_tokenizer.prompt(task.prompt or task.messages) for task in eval_tasks for _ in range(samples)
    ]
    sampling = (
        SamplingParams(temperature=0)
        if temperature is None
        else SamplingParams(temperature=temperature, top_p=1.0, top_k=0)
    )
    found = sample_completions(
        engine, prompts, sampling, max_tokens=max_tokens, stop_ids=example_tokenizer.stop_ids, seed=seed
    )
    said = [example_tokenizer.decode(one.ids) for one in found]
    return said, verify_all([task for task in eval_tasks for _ in range(samples)], said, sandbox)
