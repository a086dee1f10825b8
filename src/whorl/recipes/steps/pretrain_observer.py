"""Metrics, progress and samples of a pretraining run, for the steps `pretrain` and `decay_branch`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from whorl.recipes.registry import StepContext

if TYPE_CHECKING:
    from whorl.models import LanguageModel
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.tracking.progress import ProgressTask
    from whorl.tracking.run import MetricsLog
    from whorl.train.job import Job

SAMPLE_PROMPT = "def "
SAMPLE_TOKENS = 48


class PretrainObserver:
    """Writes the metrics and events of training to the run, the progress bar and the log."""

    def __init__(
        self, ctx: StepContext, job: Job, bytes_per_token: float, tokenizer: Tokenizer, task: ProgressTask
    ) -> None:
        self.ctx, self.steps, self.bytes_per_token = ctx, job.steps, bytes_per_token
        flops = ctx.machine.flops  # for the planned type, which may differ from the machine's choice
        self.peak_flops = flops.get(job.dtype, flops["float32"])  # denominator of `mfu`
        self.tokenizer, self.task = tokenizer, task
        self.metrics: MetricsLog | None = None
        self.last: dict[str, float] = {}
        self.started = time.monotonic()
        self.peak_memory = 0

    def _log(self, step: int) -> None:
        if self.metrics is None:
            self.metrics = self.ctx.run.metrics(self.ctx.name, resume_at=step)

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._log(step)
        assert self.metrics is not None
        metrics = {**metrics, "mfu": metrics["flops_per_second"] / self.peak_flops}
        self.metrics.write(step, {**metrics, "seconds": time.monotonic() - self.started})
        self.last.update(metrics)
        note = f"loss {metrics['nll']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.task.update(done=step, note=note + _held_out_note(self.last))

    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None:
        self._log(
            step + 1
        )  # keeps the metrics of `step` itself if the evaluation is repeated after an interruption
        assert self.metrics is not None
        values: dict[str, float | str] = dict(metrics)
        if "held_out_nll" in metrics:
            values["held_out_bits_per_byte"] = metrics["held_out_nll"] / math.log(2) / self.bytes_per_token
            from whorl.evals.likelihood import perplexity  # not above: a run of lookups imports no torch

            values["held_out_perplexity"] = perplexity(metrics["held_out_nll"], 1)
        self.last.update({k: v for k, v in values.items() if isinstance(v, float)})
        if step * 4 // self.steps > (step - max(1, self.steps // 40)) * 4 // self.steps:
            values["sample"] = self._sample(model, step)
            self.peak_memory = max(self.peak_memory, _memory_in_use())  # takes 0.02 s for each process
        self.metrics.write(step, values)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        self.ctx.run.log(f"checkpoint of step {step}: stall {seconds:.3f} s")

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._log(step)
        assert self.metrics is not None
        record = {
            "event": event["kind"],
            "message": event["message"],
            "action": event["action"],
            "documents": json.dumps(event.get("documents", []), ensure_ascii=False),
            "n_documents": event.get("n_documents", 0),
        }
        self.metrics.write(step, record)

    def _sample(self, model: LanguageModel, step: int) -> str:
        from whorl.engine import EngineConfig, SamplingParams
        from whorl.engine.engine import Engine
        from whorl.tokens.healing import heal
        from whorl.tracking.seeds import derive

        t, rows = self.tokenizer, model.config.vocab_size
        healed = heal(t, SAMPLE_PROMPT)
        engine = Engine(
            model,
            EngineConfig.for_batch(1, len(healed.ids) + SAMPLE_TOKENS),
            token_bytes=t.text_bytes(rows),
            banned_ids=t.banned_ids(rows),
            compile_native=False,  # training does not wait for a compiler
        )
        (completion,) = engine.generate(
            [healed.ids],
            SamplingParams(seed=derive(0, "sample", step)),
            max_tokens=SAMPLE_TOKENS,
            stop_ids=t.end_ids,
            forced_prefixes=[healed.forced_prefix],
        )
        text = SAMPLE_PROMPT + completion.text[len(healed.forced_prefix) :].decode("utf-8", "replace")
        self.ctx.progress.log(f"    step {step:,}: " + text.replace("\n", "\n      "))
        return text

    def close(self) -> None:
        if self.metrics is not None:
            self.metrics.close()


def _memory_in_use() -> int:
    """Return the bytes held by this process and its children; shared pages count once where the system reports them."""
    import psutil

    parent = psutil.Process()
    total = 0
    for process in [parent, *parent.children(recursive=True)]:
        try:
            info = process.memory_full_info()
            total += getattr(info, "pss", 0) or info.uss
        except psutil.Error:
            continue  # the process ended in the meantime
    return total


def _held_out_note(metrics: Mapping[str, float]) -> str:
    """Return the end of a progress line: both measures of the last evaluation, or nothing before the first."""
    if "held_out_bits_per_byte" not in metrics:
        return ""
    bits, per_token = metrics["held_out_bits_per_byte"], metrics["held_out_perplexity"]
    return f", held-out {bits:.3f} bits per byte, perplexity {per_token:.2f}"
