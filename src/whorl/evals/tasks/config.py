"""Configuration of a task: a TOML file.

    name = "arc"
    version = "1"
    kind = "choice"                        # a name of whorl.evals.kinds.KINDS, or "module:attribute"
    template = "Question: {{ question }}\nAnswer:"
    choices = "choices.text"
    gold = "choices.label.index(answerKey)"
    examples = ["Mercury_7175875"]         # few-shot examples, ids of records of data.train; or num_fewshot = 5
    metrics = ["acc", "acc_norm"]          # default: the metrics of the kind; the first one decides right or wrong

    [data]
    test = "arc.jsonl"                     # relative to this file; --data replaces it
    train = "arc-train.jsonl"
    id = "id"

    [options]                              # settings of the kind
    forms = ["cloze"]

`template` and the strings of `choices` as a list are Jinja templates. `choices` as one string, `gold`, `id`, `where`,
`cluster` and `group` are Jinja expressions: their value may be a list or a number. Both use the fields of a record,
and `item.id`, `item.gold`, `item.choices`, `item.letters` and `item.fields`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from whorl.errors import ConfigError, one_of, settings_error

GENERATION = {  # names of the harness
    "max_gen_toks": "max_tokens", "max_tokens": "max_tokens", "until": "stop", "stop": "stop",
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "seed": "seed",
}  # fmt: skip
CORRECT_TASK = "correct the task file; docs/evals.md lists the settings"
Paths = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)
]


class TaskData(BaseModel):
    """The records of a task. id, where, cluster and group are Jinja expressions over the fields of a record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    test: Paths = Field(default=(), description="files of the evaluated records: JSONL, JSON or Parquet")
    train: Paths = Field(default=(), description="files of the records from which few-shot examples come")
    unnest: str = Field(default="", description="field of a record that holds the list of records")
    where: str = Field(default="", description="keeps the records for which this is true")
    id: str = Field(default="", description="default: the field `id`, else the number of the record, from 1")
    cluster: str = Field(default="", description="equal for items that share a text; intervals use it")
    group: str = Field(default="", description="label of an item in tables, such as its subject")


class GenerationConfig(BaseModel):
    """Settings of generated answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=256, ge=1)
    stop: Paths = Field(default=(), description="the answer ends before the first of these texts")
    samples: int = Field(
        default=1, ge=1, description="answers for each item; more than one needs a temperature"
    )
    temperature: float = Field(default=0.0, ge=0, description="0 is greedy decoding")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 keeps all")
    seed: int = Field(
        default=0, ge=0, description="of the samples; each sample has its own, derived from this one"
    )
    heal: bool = Field(default=False, description="the last token of the prompt may be part of a longer one")


def generation_settings(given: Mapping[str, Any] | str, where: str) -> dict[str, Any]:
    """Return settings of `GenerationConfig` from those of lm-evaluation-harness: a mapping, or NAME=VALUE,...

    A value in a text is JSON, or the text itself. where: for messages.

    Raises:
        ConfigError: an unknown name, or a temperature next to `do_sample: false`.
    """
    found, parsed = {}, dict(given) if isinstance(given, Mapping) else {}
    for part in re.split(r",(?=\s*\w+\s*=)", given) if given and isinstance(given, str) else ():
        name, equals, value = (each.strip() for each in part.partition("="))
        if not equals:
            do = "for example temperature=0.7,top_p=0.9"
            raise ConfigError(f"{where} is {given!r}", expected="NAME=VALUE,...", do=do)
        try:
            parsed[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except ValueError:
            parsed[name] = value
    for name, value in parsed.items():
        if name not in (names := (*GENERATION, "do_sample")):
            raise ConfigError(
                f"{where} has the key {name!r}, which has no counterpart", expected=one_of(name, names)
            )
        if name != "do_sample":
            found[GENERATION[name]] = value
    if parsed.get("do_sample"):
        found.setdefault("temperature", 1.0)
    elif "do_sample" in parsed and found.setdefault("temperature", 0.0):
        raise ConfigError(
            f"{where}: do_sample is false and temperature {found['temperature']}", expected="one of them"
        )
    return found


class TaskConfig(BaseModel):
    """See the top of this file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(
        pattern=r"^[A-Za-z0-9][\w.+-]{0,99}$",
        description="letters, digits and _.+-; names the files of results",
    )
    version: str = "1"
    kind: str
    about: str = Field(default="", description="one line for lists")
    source: str = Field(default="", description="paper and origin of the data")
    data: TaskData = TaskData()
    template: str = Field(min_length=1, description="the prompt of an item, without its answer")
    system: str = Field(
        default="", description="text before everything else; the system message of a conversation"
    )
    system_end: str | None = Field(default=None, description="text after `system`; default: the separator")
    chat: bool = Field(
        default=False,
        description="send prompt, examples and answers as messages of a conversation, not as a text",
    )
    choices: str | tuple[str, ...] = ""
    gold: str = Field(default="", description="the right answer: an expression")
    examples: tuple[str, ...] = Field(default=(), description="ids of few-shot examples in data.train")
    num_fewshot: int = Field(default=0, ge=0, description="number of few-shot examples; replaces `examples`")
    fewshot_sampler: Literal["default", "first_n"] = Field(
        default="default",
        description="a random draw from data.train for each item, or the first records of it",
    )
    example_answer: str = Field(
        default="", description="template of an example's answer; default: that of the kind"
    )
    separator: str = Field(default="\n\n", description="after `system` and after each example")
    metrics: tuple[str, ...] = ()
    generation: GenerationConfig = GenerationConfig()
    options: dict[str, Any] = Field(default={}, description="settings of the kind")


def parse_task(fields: dict[str, Any], where: str) -> TaskConfig:
    """Return a configuration. where: file or task, for messages.

    Raises:
        ConfigError: a field is missing, unknown or has a wrong value.
    """
    try:
        return TaskConfig.model_validate(fields)
    except ValidationError as error:
        raise settings_error(error.errors()[0], where, TaskConfig, CORRECT_TASK) from error


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError: it is missing, or is no TOML."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}", expected="a TOML file") from error


def read_task_file(path: Path) -> TaskConfig:
    """Return the configuration of a task file, with the paths of its data made absolute.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong.
    """
    config = parse_task(read_toml(path), str(path))
    return config.model_copy(update={"data": absolute(config.data, path.parent)})


def absolute(data: TaskData, folder: Path) -> TaskData:
    """Return the data with its paths made relative to a folder; URLs stay."""

    def joined(paths: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(p if "://" in p else str((folder / Path(p).expanduser()).absolute()) for p in paths)

    return data.model_copy(update={"test": joined(data.test), "train": joined(data.train)})
