"""Options from pydantic models: names, types, help, bounds, defaults, and errors that name the option."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import typer
from pydantic import BaseModel, Field, model_validator
from tests.support.cli import refuse, succeed
from typer.testing import CliRunner

from whorl.cli.config_options import Configs, config_options, expand
from whorl.errors import ConfigError
from whorl.loadtest.config import LoadOptions, OutputOptions, RequestOptions
from whorl.serve.config import ServeConfig, ServedModelConfig, ServerProcessesConfig


class ProbeConfig(BaseModel):
    n_rows: int = Field(default=3, gt=0, le=9, description="rows of the table")
    share: float = Field(default=0.5, gt=0, description="share: of all rows")
    kind: Literal["dense", "sparse"] | None = Field(default=None, description="default: dense")
    path: Path | None = Field(default=None, json_schema_extra={"option": ["--file", "-f"], "metavar": "FILE"})
    tags: list[str] = []
    loud: bool = Field(default=False, description="print more.")
    secret: str = Field(default="no option", description="left out of the verb")

    @model_validator(mode="after")
    def _possible(self) -> ProbeConfig:
        if self.loud and self.tags:
            raise ValueError("tags are quiet")
        return self


def run(*words: str) -> tuple[Any, Any]:
    """Return (the configuration that a verb received, the result of the command)."""
    received: list[Any] = []

    def configs() -> Configs:
        return {"probe": (ProbeConfig, tuple(name for name in ProbeConfig.model_fields if name != "secret"))}

    @config_options(configs)
    def verb(name: str, *, probe: ProbeConfig) -> None:
        """Do it."""
        received.append((name, probe))

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(expand(verb))
    result = CliRunner(env={"COLUMNS": "120"}).invoke(app, [*words])
    return (received[0] if received else None), result


def test_options_reach_the_model() -> None:
    given, _ = run("one")
    assert given == ("one", ProbeConfig())
    words = ["--n-rows", "9", "-f", "a.txt", "--kind", "sparse"]
    words += ["--tags", "a", "--tags", "b", "--share", "0.25"]
    given, _ = run("two", *words)
    assert given == (
        "two",
        ProbeConfig(n_rows=9, path=Path("a.txt"), kind="sparse", tags=["a", "b"], share=0.25),
    )
    assert run("three", "--loud")[0][1].loud


def test_help_has_description_default_and_bounds() -> None:
    _, result = run("--help")
    text = " ".join(result.output.split())
    assert "--n-rows <int range> Rows of the table. [default: 3; 1<=x<=9]" in text
    assert "--share <float> Share: of all rows. [default: 0.5]" in text and "Default: dense." in text
    assert re.search(r"-f, --file FILE|--file, -f FILE", text) and "--kind <dense|sparse>" in text
    assert "--loud Print more." in text and "--no-loud" not in text and "secret" not in text


@pytest.mark.parametrize("words", ["--n-rows 0", "--n-rows 10", "--kind full", "--secret x", "--n-rows many"])
def test_wrong_value_is_refused_before_the_verb(words: str) -> None:
    given, result = run("one", *words.split())
    assert given is None and result.exit_code == 2


@pytest.mark.parametrize(
    ("words", "message"), [("--share 0", "--share is 0.0"), ("--loud --tags a", "tags are quiet")]
)
def test_error_of_the_model_names_the_option(words: str, message: str) -> None:
    given, result = run("one", *words.split())
    assert given is None and isinstance(result.exception, ConfigError) and message in str(result.exception)


@pytest.mark.parametrize(
    ("verb", "models"),
    [
        ("serve", (ServeConfig, ServedModelConfig, ServerProcessesConfig)),
        ("bench-serve", (LoadOptions, RequestOptions, OutputOptions)),
    ],
)
def test_help_of_verbs_comes_from_their_models(
    verb: str, models: tuple[type[BaseModel], ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    text = "".join(succeed(tmp_path, verb, "--help").output.split())
    hidden = {"max_choices", "max_body", "body_seconds", "stall_seconds"}
    for model in models:
        for name, field in model.model_fields.items():
            assert name in hidden or "".join((field.description or "").split())[1:] in text, name


def test_invalid_option_of_serve_is_named(tmp_path: Path) -> None:
    assert "--slo-tpot is 0.0" in refuse(tmp_path, "serve", "x", "--slo-tpot", "0")
    assert "one of them" in refuse(tmp_path, "bench-serve", "--rate", "1", "--rates", "1,2")
    assert "int3" in refuse(tmp_path, "serve", "x", "--weight-dtype", "int3")
