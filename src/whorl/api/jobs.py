"""Run a recipe, or train a model on one's own files, texts or token ids."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torch import Tensor

from whorl.api.model import Model, load
from whorl.corpus.config import IngestConfig
from whorl.corpus.documents import Document
from whorl.corpus.readers import read_documents
from whorl.corpus.sources import list_files
from whorl.errors import ConfigError, DataError
from whorl.machine.device_probe import probe
from whorl.models import LanguageModel, save_model
from whorl.plan.cost import decoder_config
from whorl.recipes import RunResult, load_recipe, run_recipe
from whorl.store import Store
from whorl.tokens.shards import TokenSet, write_shards
from whorl.tokens.token_ids import write_id_shards
from whorl.tokens.tokenizer import Tokenizer
from whorl.tracking.progress import Progress, ProgressTask
from whorl.tracking.run import MetricsLog
from whorl.train.job import Job
from whorl.train.lm.pretrain import pretrain

VALIDATION_FRACTION = 0.05
TextData = str | Path | Sequence[str] | Sequence[Path]
IdData = Tensor | Sequence[Tensor]


def run(
    recipe: str | Path,
    *,
    budget: str | None = None,
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
        until: only this step and what it needs.
        settings: fields by step: `pretrain={"seed": 1}, plan={"optim.lr_muon": 0.02}`.
        quiet: no progress bars.

    Returns:
        `artifacts` by step name (each with `path` and `summary`), `run` (its folder) and `seconds`.

    Raises:
        WhorlError: from reading the recipe, or from a step. Finished steps are kept; the same call continues.
    """
    sets = [
        f"{step}.{name}={_toml(value)}" for step, fields in settings.items() for name, value in fields.items()
    ]
    loaded = load_recipe(str(recipe), sets=sets, budget=budget, deterministic=deterministic)
    return run_recipe(loaded, Store(store), Progress.silent() if quiet else Progress(), until=until)


def train(
    data: TextData | IdData,
    *,
    out: str | Path,
    tokenizer: Tokenizer | str | Path | None = None,
    vocab_size: int = 2048,
    width: int = 128,
    depth: int = 4,
    steps: int = 200,
    batch_size: int = 8,
    seq_len: int = 128,
    seed: int = 0,
    quiet: bool = False,
    **job: Any,
) -> Model | LanguageModel:
    """Pretrain a decoder on one's own data. An interrupted call continues from its last checkpoint.

    The folder `out` receives the model, its tokenizer, `metrics.jsonl` and the checkpoints. About 5 % of the documents are
    held out for validation. For a compute budget, curation, evaluation and a report, use `run` with a recipe.

    Args:
        data: a file, a folder or a glob (text, source code, JSONL, Parquet); a list of those; a list of texts; or token
            ids: one integer tensor [n], or a list of them, one for each document.
        tokenizer: a trained tokenizer or its folder; by default byte-level BPE is learned from the data.
        vocab_size: tokens of the learned tokenizer; for token ids, the number of ids.
        width, depth: of the decoder: d_model and layers.
        steps, batch_size, seq_len: optimizer steps, rows of a step, tokens of a row.
        job: further fields of `train.job.Job`: schedule, optim, dtype, ema, z_loss, replicas, ...

    Returns:
        A `Model`. For token ids, which have no text, the network itself.

    Raises:
        DataError: no documents, or ids outside of the vocabulary. ConfigError: a setting that does not exist.
    """
    folder, progress = Path(out), Progress.silent() if quiet else Progress()
    tokens = folder / "tokens"
    tokens.mkdir(parents=True, exist_ok=True)
    learned: Tokenizer | None = None
    if _is_ids(data):
        _write_ids(data, vocab_size, tokens)
    else:
        learned = _write_texts(data, tokenizer, vocab_size, tokens, folder, progress)
    token_set = TokenSet(tokens)
    machine = probe()
    shape = decoder_config(width, depth, token_set.vocab_size).model_copy(update={"trained_length": seq_len})
    settings = {
        "tokens": str(tokens), "model": shape, "steps": steps, "batch_size": batch_size, "seq_len": seq_len, "seed": seed,
        "device": machine.device, "dtype": machine.dtype, "threads": machine.threads, "compile": steps >= 1000, **job,
    }  # fmt: skip
    try:
        settled = Job.model_validate(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(
            f"{'.'.join(map(str, problem['loc']))} is {problem['input']!r}",
            expected=str(problem["msg"]).lower(),
            do="see whorl.train.job.Job for the fields",
        ) from error
    with progress.task("Training", total=steps, unit="steps") as task:
        log = _Log(folder / "metrics.jsonl", token_set, steps, task, has_text=learned is not None)
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

    def __init__(
        self, path: Path, tokens: TokenSet, steps: int, task: ProgressTask, *, has_text: bool
    ) -> None:
        self.path, self.steps, self.task = path, steps, task
        split = tokens.split("train")
        self.bytes_per_token = split.n_bytes / max(1, len(split)) if has_text else 0.0
        self.held_out = ""
        self._metrics: MetricsLog | None = None

    def _at(self, step: int) -> MetricsLog:
        if self._metrics is None:
            self._metrics = MetricsLog(self.path, "train", resume_at=step)
        return self._metrics

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self._at(step).write(step, metrics)
        note = f"loss {metrics['nll']:.3f}, {metrics['tokens_per_second']:,.0f} tokens/s"
        self.task.update(done=step, note=note + self.held_out)

    def on_evaluation(self, step: int, metrics: dict[str, float], model: LanguageModel) -> None:
        values = dict(metrics)
        if "held_out_nll" in metrics and self.bytes_per_token:
            bits = metrics["held_out_nll"] / math.log(2) / self.bytes_per_token
            values["held_out_bits_per_byte"] = bits
            self.held_out = f", held-out {bits:.3f} bits per byte"
        elif "held_out_nll" in metrics:
            self.held_out = f", held-out loss {metrics['held_out_nll']:.3f}"
        self._at(step + 1).write(step, values)

    def on_checkpoint(self, step: int, seconds: float) -> None:
        """Checkpoints are not logged."""

    def on_event(self, step: int, event: dict[str, Any]) -> None:
        self._at(step).write(step, {k: json.dumps(v, default=str) for k, v in event.items()})


def _is_ids(data: Any) -> bool:
    return isinstance(data, Tensor) or (
        isinstance(data, Sequence)
        and not isinstance(data, str)
        and bool(data)
        and isinstance(data[0], Tensor)
    )


def _write_ids(data: Any, vocab_size: int, folder: Path) -> None:
    documents = [data] if isinstance(data, Tensor) else list(data)
    arrays = [document.detach().cpu().numpy().astype(np.int64).reshape(-1) for document in documents]
    train_ids, held_out = _split(arrays, lambda ids, at: (ids[:at], ids[at:]))
    for split, part in (("train", train_ids), ("validation", held_out)):
        write_id_shards(part, vocab_size, folder, split)


def _write_texts(
    data: Any,
    tokenizer: Tokenizer | str | Path | None,
    vocab_size: int,
    tokens: Path,
    folder: Path,
    progress: Progress,
) -> Tokenizer:
    documents = list(_documents(data))
    if not documents:
        raise DataError(f"{data!r} holds no text", expected="a file, a folder, a glob, or a list of texts")
    train_part, held_out = _split(documents, _cut_document)
    if isinstance(tokenizer, str | Path):
        tokenizer = Tokenizer.load(Path(tokenizer))
    if tokenizer is None:
        tokenizer = Tokenizer.train((document.text for document in train_part), vocab_size)
    tokenizer.save(folder)
    for split, part in (("train", train_part), ("validation", held_out)):
        size = sum(document.n_bytes for document in part)
        write_shards(part, tokenizer, tokens, split, progress=progress, total_bytes=size)
    return tokenizer


def _documents(data: Any) -> Iterable[Document]:
    given = [data] if isinstance(data, str | Path) else list(data)
    config = IngestConfig()
    for number, item in enumerate(given):
        if isinstance(item, Path) or (isinstance(item, str) and _is_source(item)):
            files, _ = list_files(IngestConfig(sources=[str(item)]))
            for file in files:
                for found in read_documents(
                    file, text_field=config.text_field, max_bytes=config.max_document_bytes
                ):
                    if isinstance(found, Document):
                        yield found
        else:
            yield Document(
                f"text-{number}", "texts", f"{number}.txt", None, 0, item, len(item.encode()), None
            )


def _is_source(text: str) -> bool:
    """Whether a text names files: a known source, an existing path, or a glob."""
    if "\n" in text or len(text) > 1000:
        return False
    return (
        text == "python-stdlib"
        or Path(text).expanduser().exists()
        or any(c in text for c in "*?[")
        or text.endswith("/")
    )


def _split(items: list[Any], cut: Any) -> tuple[list[Any], list[Any]]:
    """(training, validation): every 20th item; of fewer than 20 items, the end of the last one."""
    stride = round(1 / VALIDATION_FRACTION)
    if len(items) >= stride:
        held_out = items[::stride]
        return [item for n, item in enumerate(items) if n % stride], held_out
    last = items[-1]
    size = len(last.text) if isinstance(last, Document) else len(last)
    head, tail = cut(last, max(1, int(size * (1 - VALIDATION_FRACTION * 2))))
    return [*items[:-1], head], [tail]


def _cut_document(document: Document, at: int) -> tuple[Document, Document]:
    def part(name: str, text: str) -> Document:
        return Document(f"{document.id}{name}", document.source, document.path, document.licence, document.offset, text,
                        len(text.encode()), document.language)  # fmt: skip

    return part("", document.text[:at]), part("-end", document.text[at:])


def _toml(value: Any) -> str:
    """A Python value as `--set` reads it."""
    return value if isinstance(value, str) else json.dumps(value)
