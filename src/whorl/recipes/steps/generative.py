"""The step `generative`: train a generative model and measure its samples; `whorl gen train` runs it.

[steps.ddpm]
uses = "generative"
parents = ["images", "classifier"]     # a classifier gives the features of the Frechet distance; it may be left out
method = "ddpm"
settings = { steps = 2000 }

Without images, `density` names a known density of the plane.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import train_stage
from whorl.report import ReportData, render
from whorl.train.config import RunConfig

if TYPE_CHECKING:
    from whorl.generative.data import Data
    from whorl.generative.methods.method import GenerativeConfig


class GenerativeStepConfig(BaseModel):
    """Method, data and settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str = Field(default="ddpm", description="a name of `whorl gen methods`")
    density: str = Field(default="", description="without images: a known density, e.g. 8-gaussians")
    seed: int = Field(default=0, ge=0)
    run: RunConfig = Field(default=RunConfig(), description="checkpoints and processes")
    settings: dict[str, Any] = Field(default={}, description="changes of the method's settings")

    @model_validator(mode="after")
    def _validate(self) -> GenerativeStepConfig:
        for name in {"seed", "run"} & self.settings.keys():
            raise ValueError(f"settings.{name} has no effect; set {name} of the step")
        return self

    def generative(self) -> GenerativeConfig:
        """Return all settings. Raises ConfigError: an unknown method or setting, or a value out of range."""
        from whorl.generative.methods.registration import parse_config

        return parse_config(
            self.method, {**self.settings, "seed": self.seed, "run": self.run.model_dump(mode="json")}
        )


def _with_preset(config: GenerativeStepConfig, store: object) -> GenerativeStepConfig:
    """Write out every setting, so that the address changes with the defaults."""
    found = config.generative().model_dump(mode="json", exclude={"method", "seed", "run"})
    return config.model_copy(update={"settings": found})


@step(
    "generative", config=GenerativeStepConfig, parents={"images?": "images", "classifier?": "vision"},
    complete_config=_with_preset, not_hashed=("run",), version=2,
)  # fmt: skip
def generative(ctx: StepContext, config: GenerativeStepConfig) -> None:
    """Train a generative model, and measure its samples against held-out data."""
    from whorl.generative.features import PictureClassifier
    from whorl.generative.saved_model import save_generative
    from whorl.generative.task import GenerativeTask
    from whorl.generative.trained import check_measurable, examine
    from whorl.report.generative import model_report
    from whorl.train.rows import train_rows

    data = _open(ctx, config)
    ctx.machine.apply()
    task = GenerativeTask(data, config.generative(), ctx.machine.device)
    check_measurable(task)
    classifier = None
    if "classifier" in ctx.parents:
        classifier = PictureClassifier(ctx.parent_folder("classifier"), data.info, ctx.machine.device)
    result = train_stage(
        ctx, f"{config.method} on {data.info.name}", partial(train_rows, task), total=task.steps,
        note=lambda m: f"loss {m['loss']:.3f}",
    )  # fmt: skip
    found = examine(task, classifier, result.seconds, ctx.progress)
    saved = found.saved
    save_generative(ctx.out, task.method, task.networks, saved)
    report = model_report(found, data)
    ctx.report.cards += report.cards
    ctx.report.blocks[:0] = report.blocks
    render(ReportData(title=saved.title, reports=[(ctx.name, ctx.report)]), ctx.out / "page.html")
    measures = {m.name: m.value for m in saved.measures}
    ctx.summary.update(measures=measures, seconds=result.seconds, headline=saved.headline)


def _open(ctx: StepContext, config: GenerativeStepConfig) -> Data:
    """Return the parent `images`, or the density. Raises ConfigError: both or neither are given."""
    from whorl.generative.data import open_data

    images = ctx.parents.get("images")
    if (images is None) != bool(config.density):
        raise ConfigError(
            f"{ctx.name} has {'no data' if images is None else 'two sets of data'}",
            expected="either a parent `images`, or density",
            do=f'add parents = ["images"], or density = "8-gaussians", to steps.{ctx.name}',
        )
    if images is None:
        return open_data(config.density)
    return open_data(images.name.rpartition("/")[2], ctx.parent_folder("images"))
