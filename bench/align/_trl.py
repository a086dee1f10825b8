"""TRL's trainers as contenders (`_turns.py`): each one's own `train()`, halted at the end of every step.

Both are tuned as far as their own arguments go on a CPU, and everything that is not work is off: no log, no checkpoint, no
progress bar, no recomputing of activations (on by default), the data in the same process, the fused AdamW. What is left to
choose is `Setting`; the benchmarks measure several and take the fastest.

    kind        "fp32"; "autocast": weights fp32, bf16 products, what `bf16=True` means; "bf16": weights and all in bf16
    micro       sequences (or packed rows) in one forward pass; the optimiser steps once a batch, whatever it is
    cache       of `generate`: None (its own, which grows) or "static"
    batched     transformers' continuous batching in place of `generate`
    compiled    `torch_compile`, of what learns; `generate` cannot be compiled there (TRL forbids it)
    packing     of SFT: "bfd", whole texts, best fit; "wrapped": one stream cut anywhere, without masks

Nothing is added to a step but clocks around TRL's own methods, and `gate`. The report of a step: seconds in each part, loss,
norm of the gradient, mean reward.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from _turns import Gate
from bench.align import _workload as work

FOREVER = 10_000  # steps: the gate ends it


@dataclass(frozen=True)
class Setting:
    """One way to run a trainer (see the top of this file)."""

    kind: str = "fp32"
    micro: int = 0  # 0: the whole batch
    cache: str | None = None
    batched: bool = False
    compiled: bool = False
    packing: str = "bfd"

    def __str__(self) -> str:
        extra = [f"micro-batches of {self.micro}"] if self.micro else []
        extra += [f"{self.cache} cache"] if self.cache else []
        extra += ["continuous batching"] if self.batched else []
        extra += ["compiled"] if self.compiled else []
        extra += [self.packing] if self.packing != "bfd" else []
        return ", ".join([self.kind, *extra])


class Clocks:
    """Seconds by part, of the step under way. A part within another one counts for the inner one alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[name] += took - self._inner.pop()
            self._inner[-1] += took

    def around(self, thing: Any, method: str, name: Callable[[], str] | str) -> None:
        """Times a method of one object."""
        inner = getattr(thing, method)

        def timed(*args: Any, **named: Any) -> Any:
            with self.part(name if isinstance(name, str) else name()):
                return inner(*args, **named)

        setattr(thing, method, timed)

    def take(self) -> dict[str, float]:
        """What was gathered, which is forgotten."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


def _load(folder: Path, setting: Setting) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind = torch.bfloat16 if setting.kind == "bf16" else torch.float32
    network: Any = LlamaForCausalLM.from_pretrained(folder, dtype=kind)
    # None of these are for training; ids above 2 end nothing.
    network.generation_config.bos_token_id, network.generation_config.eos_token_id = work.BOS, work.EOS
    return network


def _common(out: Path, setting: Setting, rows: int) -> dict[str, Any]:
    """Arguments of both trainers."""
    micro = setting.micro or rows
    return {
        "output_dir": str(out), "use_cpu": True, "bf16": setting.kind == "autocast", "max_steps": FOREVER,
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro,
        "gradient_checkpointing": False, "optim": "adamw_torch_fused", "learning_rate": work.RATE,
        "lr_scheduler_type": "constant", "weight_decay": 0.0, "max_grad_norm": 1.0,
        "logging_strategy": "no", "save_strategy": "no", "eval_strategy": "no", "report_to": [],
        "disable_tqdm": True, "dataloader_num_workers": 0, "dataloader_pin_memory": False, "seed": 0,
        "torch_compile": setting.compiled,
    }  # fmt: skip


def _run(trainer: Any, clocks: Clocks, gate: Gate, report: Callable[[], dict[str, Any]]) -> None:
    """`trainer.train()`, halted behind each step."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    norms: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []

    class Halt(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_optimizer_step(self, *args: Any, **named: Any) -> None:
            clocks.seconds["optimiser"] += time.perf_counter() - self.began

        def on_step_end(self, *args: Any, **named: Any) -> None:
            loss, norm = float(sum(losses)), float(norms[-1])
            losses.clear()
            norms.clear()
            gate({"parts": clocks.take(), "loss": loss, "norm": norm, **report()})

    step, clip = trainer.training_step, trainer.accelerator.clip_grad_norm_

    def training_step(*args: Any, **named: Any) -> torch.Tensor:
        losses.append(step(*args, **named).detach())
        return losses[-1]

    def clipped(*args: Any, **named: Any) -> Any:
        norms.append(clip(*args, **named))
        return norms[-1]

    trainer.training_step, trainer.accelerator.clip_grad_norm_ = training_step, clipped
    clocks.around(trainer.accelerator, "backward", "backward")
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Halt())
    trainer.train()


def grpo(
    gate: Gate,
    folder: Path,
    out: Path,
    setting: Setting,
    prompts: list[str],
    group: int,
    n_new: int,
    beta: float,
) -> None:
    """`GRPOTrainer`: each step samples `group` answers of exactly `n_new` tokens to each prompt and learns from all at once.

    Its loss is the one it has by default (over all tokens), with ratios clipped at 0.2. With `beta` 0 there is no reference
    model, as by default; else a frozen copy scores every answer.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rewards: list[float] = []

    def judge(completions: list[str], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        rewards.extend(work.reward(text) for text in completions)
        if {len(ids) for ids in completion_ids} != {n_new}:
            raise RuntimeError("an answer is of another length than was asked for")
        return rewards[-len(completions) :]

    rows = len(prompts) * group
    # Continuous batching takes no least length; there, no id ends a text, and an end is an id like others.
    lengths = {"eos_token_id": -1} if setting.batched else {"min_new_tokens": n_new}
    trainer = GRPOTrainer(
        model=_load(folder, setting),
        reward_funcs=judge,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=work.tokenizer(folder),
        args=GRPOConfig(
            **_common(out, setting, rows), num_generations=group, max_completion_length=n_new, beta=beta,
            temperature=1.0, cache_implementation=setting.cache, generation_kwargs=lengths,
            use_transformers_continuous_batching=setting.batched, loss_type="dapo",
        ),
    )  # fmt: skip
    clocks = Clocks()
    clocks.around(trainer, "_generate_single_turn", "generation")
    clocks.around(trainer, "_calculate_rewards", "rewards")
    clocks.around(
        trainer, "_get_per_token_logps_and_entropies",
        lambda: "log-probs" if torch.is_grad_enabled() else "reference",
    )  # fmt: skip

    def report() -> dict[str, Any]:
        mean = sum(rewards) / len(rewards)
        rewards.clear()
        return {"reward": mean}

    _run(trainer, clocks, gate, report)


def sft(
    gate: Gate, folder: Path, out: Path, setting: Setting, texts: work.Rows, rows: int, length: int
) -> None:
    """`SFTTrainer`, packing texts into rows of `length`, `rows` of them a step.

    Packing whole texts, it lays the rows of a micro-batch behind one another as one long row, with a mask between texts.
    """
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    seen = 0
    trainer = SFTTrainer(
        model=_load(folder, setting),
        train_dataset=Dataset.from_dict({"input_ids": texts}),
        processing_class=work.tokenizer(folder),
        args=SFTConfig(
            **_common(out, setting, rows), packing=True, max_length=length, packing_strategy=setting.packing
        ),
    )
    clocks, inner = Clocks(), trainer.compute_loss

    def counted(model: Any, inputs: dict[str, Any], *args: Any, **named: Any) -> Any:
        nonlocal seen
        seen += int((inputs["labels"][:, 1:] != -100).sum())
        with clocks.part("forward"):
            return inner(model, inputs, *args, **named)

    trainer.compute_loss = counted

    def report() -> dict[str, Any]:
        nonlocal seen
        tokens, seen = seen, 0
        return {"tokens": tokens}

    _run(trainer, clocks, gate, report)
