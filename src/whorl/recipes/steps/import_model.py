"""The steps `import_model` and `import_vision`, which `whorl import` runs: external models as artifacts.

A language model is stored in Whorl's format (`models/exchange`, family "whorl") with its tokenizer files. A vision model
keeps the format of its family. The address covers the bytes of the source files, so a second import finds the artifact.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError, DataError
from whorl.recipes.registry import StepContext, step
from whorl.store import Store
from whorl.store.address import file_sha256


class ImportConfig(BaseModel):
    """The source folder and the fields to ignore."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(default="", description="in the format of transformers: config.json and safetensors")
    ignore: list[str] = Field(default=[], description="fields of config.json that do not affect the result")
    sha256: dict[str, str] = Field(default={}, description="of its files; computed")


def _with_file_hashes(config: ImportConfig, store: Store) -> ImportConfig:
    folder = Path(config.folder).expanduser()
    files = sorted(path for kind in ("json", "safetensors", "jinja") for path in folder.glob(f"*.{kind}"))
    if not config.folder or not (folder / "config.json").exists():
        raise ConfigError(
            f"{config.folder!r} contains no model",
            expected="a folder with config.json and model.safetensors, or shards with their index",
            do=""
            if folder.is_dir()
            else f"download it first: `hf download REPOSITORY --local-dir {folder.name}`",
        )
    hashes = {}
    for path in files:
        try:
            hashes[path.name] = file_sha256(path)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}", expected="a regular file") from error
    return config.model_copy(update={"sha256": hashes})


@step("model", config=ImportConfig, complete_config=_with_file_hashes, version=2)
def import_model(ctx: StepContext, config: ImportConfig) -> None:
    """Read a language model in the format of transformers."""
    from whorl.models.exchange import export_model
    from whorl.models.exchange import import_model as read
    from whorl.models.exchange.safetensors_io import read_json

    folder = Path(config.folder).expanduser()
    family = read_json(folder / "config.json").get("model_type")
    model = read(folder, ignore=config.ignore)
    broken = next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)
    if broken is not None:
        raise DataError(f"{folder}: {broken} has NaN or infinite values", do="fetch the weights again")
    has_tokenizer = _check_tokenizer(ctx, folder, model.config.vocab_size)
    export_model(model, ctx.out, source=folder)
    sizes = model.params()
    ctx.summary.update(
        params=sizes,
        family=family,
        has_tokenizer=has_tokenizer,
        headline=f"{family}: {sizes['total'] / 1e6:.1f} M parameters, {model.kv_bytes_per_token():,} cache bytes per token",
    )


def _check_tokenizer(ctx: StepContext, folder: Path, n_rows: int) -> bool:
    """Return whether the folder has a tokenizer; logs what is missing.

    Raises:
        DataError: it cannot be read, or is of another model: a tenth of its ids have no row.
    """
    from whorl.tokens.hf_tokenizer import load_tokenizer

    if not (folder / "tokenizer.json").is_file():
        ctx.progress.log(
            f"no tokenizer.json in {folder}: `sample` and `serve` need one; add it and import again"
        )
        return False
    n_ids = sum(map(bool, load_tokenizer(folder).token_bytes))  # a vocabulary may have gaps
    if n_ids > 1.1 * n_rows:
        raise DataError(
            f"{folder}: the tokenizer has {n_ids:,} tokens, and the model {n_rows:,} rows",
            expected="the tokenizer with which the model was trained",
        )
    return True


@step("vision", config=ImportConfig, complete_config=_with_file_hashes)
def import_vision(ctx: StepContext, config: ImportConfig) -> None:
    """Read a vision model (ViT, CLIP) in the format of transformers."""
    from whorl.models.exchange import export_vision
    from whorl.models.exchange import import_vision as read
    from whorl.models.exchange.safetensors_io import read_json

    folder = Path(config.folder).expanduser()
    family = str(read_json(folder / "config.json").get("model_type"))
    model = read(folder, ignore=config.ignore)
    export_vision(model, ctx.out, family, source=folder)
    sizes = model.params()
    ctx.summary.update(
        params=sizes, family=family, headline=f"{family}: {sizes['total'] / 1e6:.1f} M parameters"
    )


def import_step_for(folder: Path) -> str:
    """Return the name of the step that reads this folder.

    Raises:
        ConfigError: there is no model, or one of an unknown family.
    """
    from whorl.models.exchange import FAMILIES, VISION_FAMILIES
    from whorl.models.exchange.fields import model_type
    from whorl.models.exchange.safetensors_io import read_json

    path = folder / "config.json"
    if not path.is_file():
        return "import_model"  # this step raises the error for a folder without a model
    kind = model_type(read_json(path), str(path), [*FAMILIES, *VISION_FAMILIES])
    return "import_vision" if kind in VISION_FAMILIES else "import_model"
