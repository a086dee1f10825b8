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
from whorl.align.data.formats import Pair
from whorl.align.data.quarantine import Quarantine
from whorl.align.data.read import pairs, tasks
from whorl.align.model.example import Scribe
from whorl.align.model.policy_model import Network
from whorl.align.model.sampling import answer, never, rollout_engine
from whorl.engine.sampling_params import Sampling
from whorl.evals.verify import verify_all
from whorl.evals.verify.task import Task, Verdict
from whorl.machine.device_probe import Machine
from whorl.models import LanguageModel, load_model, save_model
from whorl.models.lora import load_lora, merge, save_lora
from whorl.sandbox import Sandbox
from whorl.tokens.chat import open_chat
from whorl.tokens.hf_tokenizer import open_tokenizer

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
)
ADAPTER = "adapter"


def open_scribe(folder: Path) -> Scribe:
    """The scribe of a model's tokenizer and chat template."""
    tokenizer = open_tokenizer(folder)
    return Scribe(tokenizer, open_chat(folder, tokenizer))


def open_model(folder: Path, config: StageConfig, machine: Machine) -> LanguageModel:
    """The model of a folder, to be trained: on the machine's device, computing in what is fastest there (or in what
    `config` says). What a stage adds to it (an adapter, a critic, moments, an engine that samples) lies there too.

    An adapter that a stage before left beside its model (`lora.merge = false`) is merged.
    """
    dtype = machine.torch_dtype if config.dtype is None else getattr(torch, config.dtype)
    model = load_model(folder, dtype, machine.device, to_train=True)
    if (folder / ADAPTER).is_dir():
        merge(model, load_lora(folder / ADAPTER, model))
    return model


def network_of(
    model: LanguageModel,
    scribe: Scribe,
    config: StageConfig,
    *,
    room: int,
    temperature: float = 1.0,
    critic: bool = False,
) -> Network:
    """A model as a stage trains it: judged over what can be sampled, its rows read as an engine of `room` positions does."""
    model.room = room
    out = never(scribe, model.config.vocab_size, len(scribe.tokenizer.token_bytes))
    return Network(
        model, temperature=temperature, forbidden=out, lora=config.lora, critic=critic, seed=config.seed
    )


def save_stage(network: Network, before: Path, out: Path) -> None:
    """Writes the folder of the model that came out; an adapter merged, or beside the model that it is for."""
    lora = network.lora
    network.requires_grad_(False)
    if lora is not None and lora.merge:
        merge(network.model, network.adapter())
    save_model(network.model, out)
    if lora is not None and not lora.merge:
        save_lora(network.adapter(), out / ADAPTER, base=before.name)
    for name in CARRIED:
        if (before / name).is_file() and not (out / name).exists():
            shutil.copyfile(before / name, out / name)


def read_tasks(folder: Path, split: str) -> list[Task]:
    """Those that a step wrote (`sets.py`); none where there is no file."""
    path = folder / f"tasks.{split}.jsonl"
    return list(tasks(path, Quarantine())) if path.is_file() else []


def read_pairs(folder: Path, split: str) -> list[Pair]:
    """As `read_tasks`."""
    path = folder / f"pairs.{split}.jsonl"
    return list(pairs(path, Quarantine())) if path.is_file() else []


def solve(
    network: Network,
    scribe: Scribe,
    given: Sequence[Task],
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
    engine = rollout_engine(network.copied(), scribe, sequences=64, max_length=length)
    prompts = [scribe.prompt(task.prompt or task.messages) for task in given for _ in range(samples)]
    sampling = (
        Sampling(temperature=0)
        if temperature is None
        else Sampling(temperature=temperature, top_p=1.0, top_k=0)
    )
    found = answer(engine, prompts, sampling, max_tokens=max_tokens, ends=scribe.ends, seed=seed)
    said = [scribe.words(one.ids) for one in found]
    return said, verify_all([task for task in given for _ in range(samples)], said, sandbox)
