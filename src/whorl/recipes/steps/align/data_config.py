"""Settings of the steps `tasks` and `preferences`; see `data.py`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.registry import require_extra

BugKind = Literal["syntax", "operator", "variable", "constant", "return"]


class SetConfig(BaseModel):
    """Source and size of a data set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(default=0, ge=0)
    max_train: int = Field(
        default=2000, ge=1, description="training items, at most", json_schema_extra={"shrinks_to": 64}
    )
    max_test: int = Field(
        default=128, ge=1, description="held-out items, at most", json_schema_extra={"shrinks_to": 16}
    )
    max_files: int = Field(
        default=700,
        ge=1,
        description="python: files read per split, at most",
        json_schema_extra={"shrinks_to": 64},
    )
    max_prompt_bytes: int = Field(default=600, ge=1, description="python: longest signature and docstring")
    max_completion_bytes: int = Field(default=240, ge=20, description="python: longest function body")
    path: str = Field(default="", description="files: a JSONL, Parquet or CSV file, or a folder of them")
    test_path: str = Field(
        default="", description="files: held-out records; default: a fraction of the prompts"
    )
    test_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="files: held-out fraction of the prompts without test_path"
    )
    content_hashes: list[str] = Field(default=[], description="files: their hashes; computed")

    @model_validator(mode="after")
    def _validate(self) -> SetConfig:
        source = getattr(self, "source", "")
        if (source in ("reasoning_gym", "verifiers")) != bool(getattr(self, "dataset", "")):
            raise ValueError('dataset and source = "reasoning_gym" or "verifiers" must be given together')
        if self.path and source != "files":
            raise ValueError('path is given, but source is not "files"')
        return self


class TasksConfig(SetConfig):
    """Tasks, solutions or conversations."""

    source: Literal["python", "arithmetic", "sources", "reasoning_gym", "verifiers", "files"] = "python"
    shape: Literal["conversations", "pairs", "tasks"] = Field(
        default="conversations", description="files: type of the records"
    )
    levels: dict[int, float] = Field(
        default={1: 2.0, 2: 1.0, 5: 1.0},
        description="arithmetic, reasoning_gym: level -> weight (align/data/arithmetic.py); "
        "default of reasoning_gym: the generator's own settings",
    )
    dataset: str = Field(default="", description="reasoning_gym: a generator; verifiers: a taskset")
    options: dict[str, Any] = Field(default={}, description="reasoning_gym, verifiers: its settings")
    chat: bool = Field(
        default=False, description="reasoning_gym: conversations in place of texts to continue"
    )
    columns: bool = Field(default=True, description="arithmetic: solve digit by digit")
    answer_only_fraction: float = Field(
        default=0.0, ge=0, le=1, description="arithmetic: fraction of solutions that are only the answer"
    )
    first_problem: int = Field(default=0, ge=0, description="arithmetic: number of the first problem")

    @model_validator(mode="before")
    @classmethod
    def _own_levels(cls, values: Any) -> Any:
        gym = isinstance(values, dict) and values.get("source") == "reasoning_gym"
        return {"levels": {}, **values} if gym else values

    def check_installed(self, step: str) -> None:
        """Check the package of the source. Raises ConfigError: it is not installed."""
        if self.source in ("reasoning_gym", "verifiers"):
            require_extra(f"{step}.source = {self.source}", self.source, self.source.replace("_", "-"))


class PreferencesConfig(SetConfig):
    """Pairs of completions, or single completions with a label."""

    source: Literal["python", "files", "feedback"] = "python"
    shape: Literal["preferences", "unpaired"] = Field(
        default="preferences",
        description="files, feedback: pairs of completions, or single ones with a label (for KTO); feedback with few "
        "pairs is unpaired anyway",
    )
    min_confidence: float = Field(
        default=0.6,
        ge=0.5,
        lt=1,
        description="feedback: least probability that a vote of all raters is right",
    )
    bug_kinds: tuple[BugKind, ...] = Field(
        default=("syntax", "operator", "variable", "constant", "return"),
        min_length=1,
        description="python: bugs of the rejected body (align/data/bug_injection.py)",
    )
    max_pairs_per_function: int = Field(default=1, ge=1, description="python: pairs per function, at most")
