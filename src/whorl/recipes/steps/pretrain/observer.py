"""Metrics and samples of a pretraining run, for the steps `pretrain` and `decay_branch`."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whorl.machine.memory import memory_in_use
from whorl.recipes.stage_recorder import Metrics, StageRecorder

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.tokens.hf_tokenizer import AnyTokenizer
    from whorl.train.job import Job

SAMPLE_TOKENS = 48
BOUND = "held_out_bits_per_byte_bound"  # of masked diffusion


class PretrainObserver(StageRecorder):
    """Adds to the records of training: MFU, seconds, bits per byte, perplexity, memory and samples.

    bytes_per_token: of the validation rows. prompt: of the samples. Further arguments are those of `StageRecorder`.
    """

    def __init__(
        self, *inputs: Any, job: Job, bytes_per_token: float, tokenizer: AnyTokenizer, prompt: str
    ) -> None:
        super().__init__(*inputs)
        self.steps, self.bytes_per_token, self.tokenizer = job.steps, bytes_per_token, tokenizer
        self.prompt = prompt
        flops = self.ctx.machine.flops  # for the planned type, which may differ from the machine's choice
        self.peak_flops = flops.get(job.dtype, flops["float32"])  # denominator of `mfu`
        self.started = time.monotonic()

    def on_step(self, step: int, metrics: Metrics, *more: Any) -> None:
        if not self.last and step <= max(1, self.steps // 500):  # the first record, and of no resumed run
            self.ctx.summary["first_step_seconds"] = self.ctx.run.seconds
        super().on_step(step, metrics, *more)

    def step_values(self, metrics: Metrics) -> Metrics:
        self.bar.update(total=metrics.get("planned_steps"))
        mfu = metrics["flops_per_second"] / self.peak_flops
        return {**metrics, "mfu": mfu, "seconds": time.monotonic() - self.started}

    def evaluation_values(
        self, step: int, metrics: Metrics, networks: LanguageModel
    ) -> dict[str, float | str]:
        values: dict[str, float | str] = dict(metrics)
        if "held_out_nll" in metrics:
            bits = metrics["held_out_nll"] / math.log(2) / self.bytes_per_token
            values[BOUND if networks.config.masked is not None else "held_out_bits_per_byte"] = bits
            from whorl.evals.likelihood import perplexity  # not above: a run of lookups imports no torch

            if networks.config.masked is None:
                values["held_out_perplexity"] = perplexity(metrics["held_out_nll"], 1)
        if step * 4 // self.steps > (step - max(1, self.steps // 40)) * 4 // self.steps:
            values["sample"] = self._sample(networks, step)
            values["memory_bytes"] = memory_in_use()  # takes 0.02 s for each process
        return values

    def _sample(self, model: LanguageModel, step: int) -> str:
        from whorl.engine import SamplingParams
        from whorl.evals.model.sampling import open_engine, prompt_ids
        from whorl.tracking.seeds import derive

        healed = prompt_ids(model, self.tokenizer, self.prompt)
        sizes = 1, len(healed.ids) + SAMPLE_TOKENS
        # Training does not wait for a compiler.
        engine = open_engine(model, sizes, self.tokenizer, compile_native=False)
        (completion,) = engine.generate(
            [healed.ids],
            SamplingParams(seed=derive(0, "sample", step)),
            max_tokens=SAMPLE_TOKENS,
            stop_ids=self.tokenizer.end_ids,
            forced_prefixes=[healed.forced_prefix],
        )
        text = self.prompt + completion.text.decode("utf-8", "replace")
        self.ctx.progress.log(f"    step {step:,}: " + text.replace("\n", "\n      "))
        return text


def progress_note(metrics: Mapping[str, float]) -> str:
    """Return the text next to the bar: loss, speed, and both measures of the last evaluation after the first one."""
    note = f"loss {metrics['nll']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
    measures = held_out_text(metrics)
    return f"{note}, {measures}" if measures else note


def held_out_text(metrics: Mapping[str, float]) -> str:
    """Return the measures of the validation rows in words; nothing without any."""
    if BOUND in metrics:
        return f"validation at most {metrics[BOUND]:.3f} bits per byte"
    if "held_out_bits_per_byte" not in metrics:
        return ""
    bits, per_token = metrics["held_out_bits_per_byte"], metrics["held_out_perplexity"]
    return f"validation {bits:.3f} bits per byte, perplexity {per_token:.2f}"
