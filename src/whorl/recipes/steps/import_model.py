"""Models of others as artifacts: the steps `import_model` and `import_vision`, which `whorl import` runs.

A language model becomes a folder in our own format (`models/exchange`, family "whorl"), with the tokenizer's files beside
it; a model of pictures stays in its own.
Its address covers the bytes that were read, so importing the same folder again is a look-up.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from whorl.errors import ConfigError
from whorl.recipes.registry import StepContext, step


class ImportConfig(BaseModel):
    """Which folder, and what in it may be passed over."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = Field(default="", description="as `transformers` writes it: config.json and safetensors")
    ignore: list[str] = Field(default=[], description="fields of config.json known not to change the result")
    sha256: dict[str, str] = Field(default={}, description="of its files; found by reading them")


def _with_file_hashes(config: ImportConfig) -> ImportConfig:
    folder = Path(config.folder).expanduser()
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    if not config.folder or not (folder / "config.json").exists():
        raise ConfigError(
            f"{config.folder!r} holds no model",
            expected="a folder with config.json and model.safetensors, or shards with their index",
        )
    hashes = {}
    for path in files:
        with path.open("rb") as file:
            hashes[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return config.model_copy(update={"sha256": hashes})


@step("model", config=ImportConfig, complete_config=_with_file_hashes, version=2)
def import_model(ctx: StepContext, config: ImportConfig) -> None:
    """Read a model as transformers writes it."""
    from whorl.models.exchange import export_model
    from whorl.models.exchange import import_model as read
    from whorl.models.exchange.safetensors_io import read_json

    folder = Path(config.folder).expanduser()
    family = read_json(folder / "config.json").get("model_type")
    model = read(folder, ignore=config.ignore)
    export_model(model, ctx.out, source=folder)
    sizes = model.params()
    ctx.summary.update(
        params=sizes,
        family=family,
        headline=f"{family}: {sizes['total'] / 1e6:.1f} M parameters, {model.kv_bytes_per_token():,} cache bytes a token",
    )


@step("vision", config=ImportConfig, complete_config=_with_file_hashes)
def import_vision(ctx: StepContext, config: ImportConfig) -> None:
    """Read a model of pictures (ViT, CLIP) as transformers writes it."""
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
    """Which of the two steps reads this folder.

    Raises:
        ConfigError: there is no model, or one of an unknown kind.
    """
    from whorl.models.exchange import FAMILIES, VISION_FAMILIES
    from whorl.models.exchange.fields import model_type
    from whorl.models.exchange.safetensors_io import read_json

    path = folder / "config.json"
    if not path.is_file():
        return "import_model"  # which says what a folder must hold
    kind = model_type(read_json(path), str(path), [*FAMILIES, *VISION_FAMILIES])
    return "import_vision" if kind in VISION_FAMILIES else "import_model"
