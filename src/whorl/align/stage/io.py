"""Input and output of a stage: folders of models and data sets.

A stage reads the folder of a model (weights, tokenizer, chat template) and writes another one. So stages run in any
order, and each result can be served, sampled and evaluated. Training data are folders of JSON lines
(`data/dataset_files.py`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from whorl.align.config import StageConfig
from whorl.align.data.formats import PromptCompletion
from whorl.align.data.read import pairs
from whorl.align.model.policy_model import PolicyModel
from whorl.data.quarantine import Quarantine
from whorl.evals import grading
from whorl.evals.grading import VerifiableTask
from whorl.machine.device_probe import Machine
from whorl.models import LanguageModel, load_model, save_model
from whorl.models.lora import ADAPTER, merge_lora, save_lora
from whorl.tokens.token_encoder import TokenEncoder

COPIED_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
)


def load_stage_model(folder: Path, config: StageConfig, machine: Machine) -> LanguageModel:
    """Return the model of a folder for training, on the machine's device.

    It computes in the fastest dtype there, or in `config.model.dtype`. Adapter, critic, optimizer state and
    engine use the same device.
    """
    dtype = machine.torch_dtype if config.model.dtype is None else getattr(torch, config.model.dtype)
    return load_model(folder, dtype, machine.device, to_train=True)


def make_policy_model(
    model: LanguageModel,
    encoder: TokenEncoder,
    config: StageConfig,
    *,
    context_hint: int,
    temperature: float = 1.0,
    critic: bool = False,
) -> PolicyModel:
    """Return a model as a stage trains it: scored over the ids that can be sampled.

    context_hint: context length of the engine that rows must agree with.
    """
    model.context_hint = context_hint
    encoder.require_end()
    banned = encoder.banned_ids(model.config.vocab_size)
    return PolicyModel(
        model,
        temperature=temperature,
        banned_ids=banned,
        lora=config.model.lora,
        critic=critic,
        seed=config.seed,
    )


def open_policy(
    folder: Path, config: StageConfig, machine: Machine, **options: Any
) -> tuple[TokenEncoder, PolicyModel]:
    """Return the tokenizer and the model of a folder, as a stage on `machine` trains it.

    options: of `make_policy_model`.
    """
    machine.apply()
    tokenizer, model = TokenEncoder.load(folder), load_stage_model(folder, config, machine)
    return tokenizer, make_policy_model(model, tokenizer, config, **options)


def save_stage_model(network: PolicyModel, base: Path, out: Path, files: Path | None = None) -> None:
    """Write the folder of the trained model, with its adapter merged or next to the base model.

    files: folder of another tokenizer than that of `base`.
    """
    lora = network.lora
    network.requires_grad_(False)
    if lora is not None and lora.merge:
        merge_lora(network.model, network.adapter())
    save_model(network.model, out)
    if lora is not None and not lora.merge:
        save_lora(network.adapter(), out / ADAPTER, base=base.name)
    copy_text_files(files or base, out)


def copy_text_files(folder: Path, out: Path) -> None:
    """Copy the tokenizer, the chat template and the ids that end a text from a model's folder into another."""
    for name in COPIED_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def read_tasks(folder: Path, split: str) -> list[VerifiableTask]:
    """Return the tasks that a step wrote (`data/dataset_files.py`); empty if there is no file."""
    path = folder / f"tasks.{split}.jsonl"
    return list(grading.read_tasks(path, Quarantine())) if path.is_file() else []


def read_prompt_completions(folder: Path, split: str) -> list[PromptCompletion]:
    """Return the prompt-completion pairs; otherwise as `read_tasks`."""
    path = folder / f"pairs.{split}.jsonl"
    return list(pairs(path, Quarantine())) if path.is_file() else []


def record_pass_criterion(
    tests: Sequence[VerifiableTask], summary: dict[str, Any], log: Callable[[str], None]
) -> str:
    """Log and record what passing a held-out task means; return it for the headline, or "" without tasks."""
    if not tests:
        return ""
    criterion = summary["pass_criterion"] = grading.pass_criterion(tests)
    log(f"    a pass on held-out tasks: {criterion}")
    return f"; a pass: {criterion}"
