"""The arguments of `whorl plan`: MODEL is a name, a file, an artifact, a recipe or a shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from whorl.models import TransformerConfig
    from whorl.store import Store

SHAPE = re.compile(r"(\d+)x(\d+)/(\d+)(?:/(\d+)x(\d+))?")
SIZES = (8, 256)  # rows and tokens of a step, by default
_MODEL = "A published model (gpt2), a folder or file with config.json, an artifact, a recipe, or a shape (6x384/8192)."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)]
Devices = Annotated[str, typer.Option("--device", metavar="NAME[xCOUNT]", help="As h100, h100x8, here.")]
Context = Annotated[int, typer.Option(min=2, help="Positions of a sequence.")]
Batch = Annotated[int, typer.Option(min=1, help="Sequences of a step, over all devices.")]
Format = Annotated[str, typer.Option(help="fp32, tf32, bf16, fp16, fp8_e4m3, fp8_e5m2, int8 or int4.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def find_model(given: str, store: Store) -> tuple[TransformerConfig, str, tuple[int, int]]:
    """Return the shape that MODEL names, its name for people, and rows and tokens of a training step.

    Raises:
        ConfigError: it names nothing, or its family is unknown. StoreError, CheckpointError: it cannot be read.
    """
    from whorl.errors import ConfigError, StoreError, one_of
    from whorl.models import TransformerConfig
    from whorl.models.exchange import read_config
    from whorl.models.exchange.safetensors_io import read_json
    from whorl.models.serialization import read_config as config_of
    from whorl.plan.accounting.model_cost import decoder_config, known_models
    from whorl.plan.training_plan import TrainingPlan
    from whorl.recipes import load_recipe, ready_recipes
    from whorl.store.address import user_path

    path, name = user_path(given), given.rpartition("/")[2].lower()
    path = path / "config.json" if (path / "config.json").is_file() else path
    if path.is_file() and path.suffix == ".json":
        return read_config(read_json(path), str(path)), str(path), SIZES
    if name in known_models():
        return known_models()[name], name, SIZES
    if match := SHAPE.fullmatch(given):
        layers, width, vocabulary, *batch = (int(text) for text in match.groups() if text is not None)
        if width % 32 or min(layers, width) < 1 or vocabulary < 2 or 0 in batch:
            raise ConfigError(f"the shape {given}", expected="a width that 32 divides, and sizes above 0")
        return decoder_config(width, layers, vocabulary), given, (batch[0], batch[1]) if batch else SIZES
    do = "give a model of `whorl ls`, a config.json, or layers x width / vocabulary: 6x384/8192 or 6x384/8192/16x256"
    if given in ready_recipes() or path.suffix == ".toml":
        recipe = load_recipe(given)
        configs: list[Any] = [step.config for step in recipe.steps.values() if step.kind.name == "plan"]
        if configs and configs[0].model:
            return TransformerConfig.model_validate(configs[0].transformer_fields()), given, SIZES
        given, do = f"{recipe.name}/plan", f"make the plan first: whorl run {given} --until plan"
    try:
        artifact = store.open(given)
    except StoreError as error:
        known = one_of(name, list(known_models()))
        raise ConfigError(
            error.what, expected=f"an artifact, a file, a recipe, a shape, or {known}", do=do
        ) from error
    if artifact.kind == "plan":
        job = TrainingPlan.model_validate_json(artifact.file("plan.json").read_bytes()).job
        return job.model, artifact.label, (job.batch_size, job.seq_len)
    if artifact.kind != "model":
        raise ConfigError(
            f"{artifact.label} is of the kind {artifact.kind}", expected="a model or a plan", do=do
        )
    return config_of(artifact.path), artifact.label, SIZES
