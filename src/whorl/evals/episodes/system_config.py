"""Configuration of a system: a TOML file.

name = "support"
model = "http://127.0.0.1:8000/v1"      # an artifact, a folder (relative to this file), or a URL
model_name = "my-model"                 # with a URL
timeout = 120.0                         # with a URL: seconds without a byte; default: --timeout
concurrency = 4                         # with a URL: requests at once; default: --concurrency
system = "You answer questions of customers."
trace = "support-trace.jsonl"           # the messages, calls and blocked texts of each answer

[retrieval]
documents = "manual.jsonl"              # records with a text
k = 3

[tools]
names = ["python", "finish"]

[guard]
patterns = ["(?i)credit card number"]
check = "my_package.guards:is_safe"     # (text) -> why it is blocked, or ""
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from whorl.errors import settings_error
from whorl.evals.episodes.folder import FolderOptions
from whorl.evals.tasks.config import Paths, read_toml
from whorl.evals.tasks.template import Template

PROMPT = "These documents may help:\n\n{{ documents }}\n\n{{ question }}"


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RetrievalConfig(_Settings):
    """Documents before the question."""

    documents: Paths = Field(min_length=1, description="files of records, relative to the file of the system")
    text: str = Field(default="text", description="field of a record")
    k: int = Field(default=3, ge=1, description="documents before a question")
    max_characters: int = Field(default=2000, ge=1, description="of each document")
    template: str = Field(default=PROMPT, description="with documents and question")

    @field_validator("template")
    @classmethod
    def _template(cls, text: str) -> str:
        names = Template(text, "retrieval.template").names
        if names != {"documents", "question"}:
            raise ValueError("expected {{ documents }} and {{ question }}")
        return text


class ToolsConfig(FolderOptions):
    """Calls of tools inside the system, as in the kind `agent`. Its folder is empty at the start and is dropped."""

    tools: tuple[Literal["python", "files", "finish"], ...] = Field(
        default=("python", "finish"), alias="names"
    )
    steps: int = Field(default=8, ge=1, description="messages for one answer")


class GuardConfig(_Settings):
    """Blocks prompts before the model, and answers after it."""

    patterns: tuple[str, ...] = Field(
        default=(), description="regular expressions; a text with a match is blocked"
    )
    check: str = Field(
        default="", description='"module:attribute" of a function (text) -> reason, "" to let it pass'
    )
    on: tuple[Literal["prompt", "answer"], ...] = ("prompt", "answer")
    answer: str = Field(default="I cannot help with that.", description="in place of what is blocked")

    @field_validator("patterns")
    @classmethod
    def _patterns(cls, patterns: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
        return patterns


class SystemConfig(_Settings):
    """See the top of this file."""

    name: str
    model: str
    model_name: str = ""
    timeout: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, description="with a URL: seconds without a byte"
    )
    concurrency: int | None = Field(default=None, ge=1, description="with a URL: requests at once")
    system: str = ""
    retrieval: RetrievalConfig | None = None
    tools: ToolsConfig | None = None
    guard: GuardConfig | None = None
    trace: str = Field(
        default="", description="file of JSON lines: documents, calls and guard decisions of each answer"
    )


def read_system(path: Path) -> SystemConfig:
    """Return the configuration of a file, with absolute paths.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong.
    """
    try:
        config = SystemConfig.model_validate(read_toml(path))
    except ValidationError as error:
        raise settings_error(
            error.errors()[0], str(path), SystemConfig, "correct the file of the system"
        ) from error
    changes: dict[str, object] = {}
    if (path.parent / config.model).is_dir():
        changes["model"] = str((path.parent / config.model).absolute())
    if config.retrieval is not None:
        documents = tuple(str((path.parent / each).absolute()) for each in config.retrieval.documents)
        changes["retrieval"] = config.retrieval.model_copy(update={"documents": documents})
    if config.trace:
        changes["trace"] = str((path.parent / config.trace).absolute())
    return config.model_copy(update=changes)
