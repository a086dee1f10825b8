"""The models of an arena, as a user names them, and the prompts that they answer.

quickstart/sft                        an artifact, or a folder of a model
http://127.0.0.1:8000/v1#my-model     a model of an endpoint
small=quickstart/sft                  with the name that ratings show
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from whorl.data.files import format_suffix
from whorl.errors import ConfigError, DataError, shorten
from whorl.evals.arena.arena import ModelArena
from whorl.evals.arena.arena_log import ArenaLog
from whorl.evals.arena.options import AnswerSettings, BattleConfig
from whorl.evals.model.open_model import is_url, open_backend
from whorl.evals.model.options import DEFAULT_TIMEOUT, Dtype, ModelOptions
from whorl.evals.model.requests import ModelBackend
from whorl.evals.tasks.records import read_records

BATCH_SIZE = 2  # requests at once: a judge and a battle have two
_NAMED = re.compile(r"([\w.+-]+)=(.+)", re.DOTALL)


def parse_contestant(text: str, options: ModelOptions) -> tuple[str, str, ModelOptions]:
    """Return name, reference and options of one model.

    Raises:
        ConfigError: an endpoint without a model.
    """
    match = _NAMED.fullmatch(text)
    name, ref = match.groups() if match else ("", text)
    if not is_url(ref):
        return name or ref, ref, options
    url, _, model = ref.partition("#")
    if not model:
        raise ConfigError(
            f"the endpoint {shorten(url)} has no model", expected=f"{shorten(url)}#MODEL", do="GET /models lists them"
        )  # fmt: skip
    return name or model, url, options.model_copy(update={"model_name": model})


def open_contestant(
    text: str, *, dtype: Dtype = "float32", store: str | None = None, timeout: float = DEFAULT_TIMEOUT
) -> tuple[str, ModelBackend]:
    """Return name and back end of one model. Raises: as `parse_contestant` and `open_backend`."""
    options = ModelOptions(dtype=dtype, batch_size=BATCH_SIZE, store=store, timeout=timeout)
    name, ref, options = parse_contestant(text, options)
    return name, open_backend(ref, options)


def open_arena(
    refs: list[str], battle: BattleConfig, answers: AnswerSettings, store: str | None
) -> ModelArena:
    """Return an arena of models, which continues the log of `battle`. Raises: as `open_contestants`."""
    opened = open_contestants(refs, dtype=battle.dtype, store=store, timeout=battle.timeout)
    log, rng = ArenaLog(battle.votes), np.random.default_rng(battle.seed)
    return ModelArena(opened, log, rng, answers, sampling=battle.sampling)


def open_contestants(
    texts: Sequence[str], *, dtype: Dtype = "float32", store: str | None = None, timeout: float = DEFAULT_TIMEOUT,
) -> dict[str, ModelBackend]:  # fmt: skip
    """Return name -> back end. Equal references share one.

    Raises ConfigError: fewer than two models, or two of one name. StoreError, CheckpointError: as `open_backend`.
    """
    options = ModelOptions(dtype=dtype, batch_size=BATCH_SIZE, store=store, timeout=timeout)
    parsed = [parse_contestant(text, options) for text in texts]
    names = [name for name, _, _ in parsed]
    twice = sorted({name for name in names if names.count(name) > 1})
    if len(names) < 2 or twice:
        raise ConfigError(
            f"two models have the name {shorten(twice[0])!r}" if twice else f"an arena of {len(names)} models",
            expected="different names, such as small=quickstart/sft" if twice else "at least two",
        )  # fmt: skip
    opened: dict[tuple[str, str], ModelBackend] = {}
    found = {}
    for name, ref, own in parsed:
        key = (ref, own.model_name)
        if key not in opened:
            opened[key] = open_backend(ref, own)
        found[name] = opened[key]
    return found


def read_prompts(path: Path, field: str = "prompt") -> list[str]:
    """Return the prompts of a file: lines of a .txt file, or a field of records.

    Raises:
        DataError: the file is missing, has no prompt, or a record lacks the field.
    """
    if format_suffix(str(path)) == ".txt":
        try:
            found = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
        except (OSError, ValueError) as error:
            raise DataError(
                f"{path} cannot be read: {error}", expected="a text file, a prompt in each line"
            ) from error
    else:
        found = []
        for number, record in enumerate(read_records([str(path)], "prompts"), 1):
            value = record.get(field)
            if not isinstance(value, str) or not value.strip():
                raise DataError(
                    f"{path}, record {number}: the field {field!r} is {shorten(repr(value), 60)}",
                    expected=f"a text; the record has the fields {', '.join(list(record)[:10])}",
                    do="name the field of the prompts with --field",
                )  # fmt: skip
            found.append(value)
    if not found:
        raise DataError(f"{path} has no prompt", expected="at least one")
    return found
