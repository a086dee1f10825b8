"""TRL's trainers as contenders (`bench/_turns.py`): `train()` of each, with a gate at the end of every step.

Both are tuned with their arguments for a CPU. Logs, checkpoints, progress bars, activation checkpointing (on by
default) and data loader processes are off; the fused AdamW is on. `Setting` holds the remaining choices. The benches
measure several settings and compare with the fastest.

    kind        "fp32"; "autocast": fp32 weights, bf16 products (TRL's `bf16=True`); "bf16": bf16 weights and products
    micro       sequences (or packed rows) per forward pass; the optimizer steps once per batch
    cache       KV cache of `generate`: None (dynamic) or "static"
    batched     transformers' continuous batching instead of `generate`
    compiled    `torch_compile` for the trained model; TRL forbids it for `generate`
    packing     of SFT: "bfd", whole texts, best fit; "wrapped": one stream cut at any place, without document masks

A step contains only TRL's work, timers around TRL's methods, and `gate`. The report of a step holds the seconds of each
part, loss, gradient norm and mean reward. `parse_options`, `measure` and `best_of` run the comparison with Whorl.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from bench._run import emulates_bf16, parse, sized, smoke
from bench._turns import Gate, Step, Turn, in_turn
from bench.align import _workload as work

from whorl.machine.device_probe import usable_cores

FOREVER = 10_000  # steps; the gate ends the run earlier
KINDS = {"fp32": ("fp32",), "bf16": ("autocast", "bf16")}  # dtype of the comparison -> kinds of `Setting`


@dataclass(frozen=True)
class Setting:
    """Settings of a trainer; the module docstring lists the values."""

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
    """Seconds by part of the current step. Nested parts are counted for the inner part only."""

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
        """Replace a method of one object by a timed one."""
        inner = getattr(thing, method)

        def timed(*args: Any, **named: Any) -> Any:
            with self.part(name if isinstance(name, str) else name()):
                return inner(*args, **named)

        setattr(thing, method, timed)

    def take(self) -> dict[str, float]:
        """Return the seconds by part, and reset them."""
        found = dict(self.seconds)
        self.seconds.clear()
        return found


def _load(folder: Path, setting: Setting) -> Any:
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    kind = torch.bfloat16 if setting.kind == "bf16" else torch.float32
    network: Any = LlamaForCausalLM.from_pretrained(folder, dtype=kind)
    # Used by `generate` only.
    network.generation_config.bos_token_id, network.generation_config.eos_token_id = work.BOS, work.EOS
    return network


def _common(out: Path, setting: Setting, rows: int) -> dict[str, Any]:
    """Return the arguments that both trainers share."""
    micro = min(setting.micro or rows, rows)
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
    """Run `trainer.train()` with a gate after each step."""
    from transformers import TrainerCallback
    from transformers.trainer_callback import PrinterCallback

    norms: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []

    class Halt(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *args: Any, **named: Any) -> None:
            self.began = time.perf_counter()

        def on_optimizer_step(self, *args: Any, **named: Any) -> None:
            clocks.seconds["optimizer"] += time.perf_counter() - self.began

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
    """Run `GRPOTrainer` with `group` completions of exactly `n_new` tokens per prompt and one update per batch.

    The loss is TRL's default: the mean over all tokens, with ratios clipped at 0.2. With `beta` 0 there is no reference
    model, which is TRL's default too. Otherwise a frozen copy scores every completion.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rewards: list[float] = []

    def reward(completions: list[str], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        rewards.extend(work.reward(text) for text in completions)
        if {len(ids) for ids in completion_ids} != {n_new}:
            raise RuntimeError("a completion does not have the requested length")
        return rewards[-len(completions) :]

    rows = len(prompts) * group
    # Continuous batching has no minimum length, so the end id is disabled there.
    lengths = {"eos_token_id": -1} if setting.batched else {"min_new_tokens": n_new}
    trainer = GRPOTrainer(
        model=_load(folder, setting),
        reward_funcs=reward,
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
        lambda: "logprobs" if torch.is_grad_enabled() else "reference",
    )  # fmt: skip

    def report() -> dict[str, Any]:
        mean = sum(rewards) / len(rewards)
        rewards.clear()
        return {"reward": mean}

    _run(trainer, clocks, gate, report)


def sft(
    gate: Gate, folder: Path, out: Path, setting: Setting, texts: work.Rows, rows: int, length: int
) -> None:
    """Run `SFTTrainer` with texts packed into rows of `length`, and `rows` rows per step.

    With strategy "bfd" TRL concatenates the rows of a micro-batch into one long row with a document mask.
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


def parse_options(
    doc: str | None, add: Callable[[argparse.ArgumentParser], Any], smoke_sizes: Mapping[str, Any]
) -> argparse.Namespace:
    """The arguments of the script; exits with 77 if TRL is to run and is not installed.

    Args:
        add: adds the script's own arguments.
        smoke_sizes: their values under `--smoke`.
    """

    def arguments(options: argparse.ArgumentParser) -> None:
        options.add_argument("--quick", action="store_true")
        options.add_argument(
            "--kind", choices=tuple(KINDS), help="dtype of both sides; default: all; quick: the machine's"
        )
        options.add_argument("--only", choices=("trl", "ours"))
        options.add_argument("--plain", action="store_true", help="TRL with the default allocator, too")
        options.add_argument("--rounds", type=int)
        add(options)

    given = parse(doc, arguments, smoke={"quick": True, "kind": "fp32", "rounds": 2, **smoke_sizes})
    if given.quick:
        given.kind = given.kind or work.own_dtype()
    if given.kind is None and emulates_bf16():
        given.kind = "fp32"
    if smoke():
        given.only = given.only or "ours"
    if given.only != "ours" and importlib.util.find_spec("trl") is None:
        print("skipped: needs trl (pip install trl)")
        sys.exit(77)
    return given


def measure(
    given: argparse.Namespace,
    settings: Callable[[list[str], bool], list[Setting]],
    run_trl: Callable[..., None],
    run_ours: Callable[..., None],
    make_job: Callable[[Path], tuple[Any, ...]],
) -> dict[str, list[Step]]:
    """The timed steps of every contender, in turn: "TRL, SETTING" or "ours, KIND" -> steps.

    Args:
        settings: of TRL, for its names of the dtypes and `--quick`.
        run_trl, run_ours: of `_trl.py` and `_ours.py`.
        make_job: the arguments of both, from the folder of the model.
    """
    threads, kinds = usable_cores(), [given.kind] if given.kind else list(KINDS)
    with tempfile.TemporaryDirectory() as name:
        folder, out = work.write(Path(name) / "hf"), Path(name) / "out"
        job = make_job(folder)
        turns: dict[str, Turn] = {}
        if given.only != "ours":
            for setting in settings([k for kind in kinds for k in KINDS[kind]], given.quick):
                for keep in (True, False) if given.plain else (True,):
                    turns[f"TRL, {setting}{'' if keep else ', default allocator'}"] = Turn(
                        run_trl, folder, out, setting, *job, threads=threads, keep_memory=keep
                    )
        if given.only != "trl":
            for kind in kinds:
                turns[f"ours, {kind}"] = Turn(run_ours, folder, kind, *job, threads=threads)
        warm, rounds = (1, 3) if given.quick else (2, 7)
        return in_turn(turns, warm=sized(warm, 0), rounds=given.rounds or rounds)


def best_of(
    steps: Mapping[str, list[Step]], score: Callable[[list[Step]], float]
) -> dict[str, tuple[str, float]]:
    """The best contender of each side and its score: "ours" or "TRL" -> (name, score); a side that did not run has 0."""
    found = {}
    for side in ("ours", "TRL"):
        scores = {name: score(timed) for name, timed in steps.items() if name.startswith(side)}
        found[side] = max(scores.items(), key=lambda item: item[1], default=(f"{side} (not run)", 0.0))
    return found
