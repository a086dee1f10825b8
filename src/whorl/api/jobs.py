"""Run a recipe, or train a model on one's own files, texts or token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whorl.api.arguments import as_count, as_path, checked_by_pydantic, invalid
from whorl.api.data import IdData, TextData, check_data, is_token_ids, write_id_split, write_text_split
from whorl.api.model import Model, load
from whorl.evals.likelihood import perplexity
from whorl.machine.device_probe import probe
from whorl.models import LanguageModel, save_model
from whorl.plan.accounting.model_cost import decoder_config
from whorl.recipes import RunResult, load_recipe, run_recipe
from whorl.store import Store
from whorl.tokens import Tokenizer, TokenSet
from whorl.tracking.progress import Progress, ProgressTask
from whorl.tracking.run import MetricsLog, event_record
from whorl.train.job import job_of_program
from whorl.train.lm.pretrain import pretrain
from whorl.train.metrics.validation import held_out_bytes_per_target


def run(
    recipe: str | Path,
    *,
    budget: str | None = None,
    model: str = "",
    until: str | None = None,
    store: str | None = None,
    deterministic: bool = False,
    quiet: bool = False,
    **settings: Mapping[str, Any],
) -> RunResult:
    """Run a recipe, as `whorl run` does: make its artifacts, or look them up.

    Args:
        recipe: a ready recipe (`whorl recipes`) or a TOML file.
        budget: cost of training: a time ("90s", "5m") or an amount of work ("1e15flops").
        model: to start from, in place of the one that the recipe would train: an artifact or a folder.
        until: only this step and what it needs.
        settings: fields by step: `pretrain={"seed": 1}, plan={"optim.lr_muon": 0.02}`.
        quiet: no progress bars.

    Returns:
        `artifacts` by step name (each with `path` and `summary`), `run` (its folder) and `seconds`.

    Raises:
        WhorlError: from reading the recipe, or from a step. Finished steps are kept; the same call continues.
    """
    sets = [
        f"{step}.{name}={_toml(step, value)}"
        for step, fields in settings.items()
        for name, value in _fields(step, fields).items()
    ]
    name = as_path("recipe", recipe)
    place = store and as_path("store", store)
    if not isinstance(until, str | None):
        raise invalid("until", until, "the name of a step")
    loaded = load_recipe(name, sets=sets, budget=budget, deterministic=deterministic, model=model)
    return run_recipe(loaded, Store(place), Progress.silent() if quiet else Progress(), until=until)


def train(
    data: TextData | IdData,
    *,
    out: str | Path,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int = 2048,
    width: int = 128,
    depth: int = 4,
    steps: int = 200,
    quiet: bool = False,
    **job: Any,
) -> Model | LanguageModel:
    """Pretrain a decoder on one's own data. An interrupted call continues from its last checkpoint.

    The folder `out` receives the model, its tokenizer, `metrics.jsonl` and the checkpoints. About 5 % of the documents are
    held out for validation. For a compute budget, curation, evaluation and a report, use `run` with a recipe.

    Args:
        data: a file, a folder or a glob (text, source code, JSONL, Parquet); a list of those; a list of texts; or token
            ids: one integer tensor or array [n], or a list of them, one for each document.
        tokenizer: a trained tokenizer or its folder; by default byte-level BPE is learned from the data.
        vocab_size: tokens of the learned tokenizer; for token ids, the number of ids.
        width, depth: of the decoder: d_model and layers.
        steps: optimizer steps.
        job: further fields of `train.job.Job`: batch_size (8 rows a step), seq_len (128 tokens a row), seed, schedule,
            optim, dtype, ema, replicas, ...

    Returns:
        A `Model`. For token ids, which have no text, the network itself.

    Raises:
        DataError: no documents, or ids outside of the vocabulary. ConfigError: a setting that does not exist.
    """
    vocab_size, width = as_count("vocab_size", vocab_size), as_count("width", width, 32)  # of a head
    depth, steps = as_count("depth", depth), as_count("steps", steps)
    folder, progress = Path(as_path("out", out)), Progress.silent() if quiet else Progress()
    if not isinstance(tokenizer, Tokenizer | None):
        tokenizer = Tokenizer.load(Path(as_path("tokenizer", tokenizer)))
    data = check_data(data)
    tokens = folder / "tokens"
    try:
        tokens.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise invalid("out", str(out), f"a folder that can be made ({error.strerror})") from error
    learned: Tokenizer | None = None
    if is_token_ids(data):
        write_id_split(data, vocab_size, tokens)
    else:
        learned = write_text_split(data, tokenizer, vocab_size, tokens, folder, progress)
    token_set = TokenSet(tokens)
    machine = probe()
    job = {"batch_size": 8, "seq_len": 128, **job}
    with checked_by_pydantic():
        shape = decoder_config(width, depth, token_set.vocab_size, trained_length=job["seq_len"])
    settled = job_of_program({
        "tokens": str(tokens), "model": shape, "steps": steps, "device": machine.device, "dtype": machine.dtype,
        "threads": machine.threads, "compile": steps >= 1000, **job,
    })  # fmt: skip
    with progress.task("Training", total=steps, unit="steps") as task:
        sizes = learned.text_bytes(learned.vocab_size) if learned else None
        per_token = held_out_bytes_per_target(settled, sizes) if sizes else 0.0
        log = _Log(folder / "metrics.jsonl", per_token, steps, task)
        network = pretrain(settled, folder / "checkpoints", log, log=progress.log)
    save_model(network, folder)
    if learned is None:
        return network
    learned.save(folder)
    model = load(folder)
    assert isinstance(model, Model)
    return model


class _Log:
    """Training callback: writes `metrics.jsonl` and updates the progress bar."""

    def __init__(self, path: Path, bytes_per_token: float, steps: int, task: ProgressTask) -> None:
        self.path, self.bytes_per_token, self.steps, self.task = path, bytes_per_token, steps, task
        self.held_out = ""
        self._metrics: MetricsLog | None = None

    def _at(self, step: int) -> MetricsLog:
        if self._metrics is None:
            self._metrics = MetricsLog(self.path, "train", resume_at=step)
        return self._metrics

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._at(step).write(step, metrics)
        note = f"loss {metrics['nll']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.task.update(done=step, total=metrics.get("planned_steps"), note=note + self.held_out)

    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None:
        values = dict(metrics)
        if "held_out_nll" in metrics and self.bytes_per_token:
            bits = metrics["held_out_nll"] / math.log(2) / self.bytes_per_token
            values["held_out_bits_per_byte"] = bits
            values["held_out_perplexity"] = per_token = perplexity(metrics["held_out_nll"], 1)
            self.held_out = f", validation {bits:.3f} bits per byte, perplexity {per_token:.2f}"
        elif "held_out_nll" in metrics:
            self.held_out = f", validation loss {metrics['held_out_nll']:.3f}"
        self._at(step + 1).write(step, values)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        """Checkpoints are not logged."""

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._at(step).write(step, event_record(event))


def _fields(step: str, fields: Any, prefix: str = "") -> dict[str, Any]:
    """Return the settings of a step; those of nested tables with dotted names."""
    if not isinstance(fields, Mapping):
        raise invalid(step, fields, "settings of the step by name, such as {'seed': 1}")
    found: dict[str, Any] = {}
    for name, value in fields.items():
        nested = isinstance(value, Mapping) and value
        found |= _fields(step, value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


def _toml(step: str, value: Any) -> str:
    """Return a Python value as `--set` reads it."""
    try:
        if isinstance(value, str | Path):
            return str(value)
        return json.dumps(value, default=lambda array: array.tolist())  # of NumPy or torch
    except (AttributeError, TypeError, ValueError) as error:
        raise invalid(f"a setting of {step}", value, "text, numbers, lists or tables") from error
