"""A trained generative model in a folder: its settings and data in `model.json`, weights, and its measures.

model.json           settings of the method, and `DataInfo`
model.safetensors    weights and buffers by name
measures.json        `SavedMeasures`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import load_file, save_file

from whorl.data.images import ImageShape, Pixels
from whorl.errors import ConfigError, one_of
from whorl.generative.data import DataInfo, to_rows
from whorl.generative.measures import SampleMeasure
from whorl.generative.methods.method import DrawOptions, GenerativeMethod
from whorl.generative.methods.registration import METHODS, parse_config
from whorl.generative.pictures import draw_rows
from whorl.generative.samplers import Sampler
from whorl.machine.device_probe import probe
from whorl.store import Artifact
from whorl.tracking.seeds import generator

KIND = "generative"


class SavedMeasures(BaseModel):
    """The result of the step `generative`. seconds: of training; sample_seconds: per 1,000 samples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    data: str
    fingerprint: str
    shape: tuple[int, ...]
    parameters: int
    steps: int
    seconds: float
    sample_seconds: float
    measures: tuple[SampleMeasure, ...]
    diagnosis: dict[str, float] = {}

    @property
    def title(self) -> str:
        return f"{self.method} on {self.data}"

    @property
    def headline(self) -> str:
        """The first distance and the diagnosis."""
        first = [f"{m.name} distance {m.value:.3f} (real data {m.floor:.3f})" for m in self.measures[:1]]
        return "; ".join([*first, *(f"{name} {value:.3g}" for name, value in self.diagnosis.items())])


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    data: DataInfo


def save_generative(folder: Path, method: GenerativeMethod, networks: Any, measures: SavedMeasures) -> None:
    """Write the files of a model."""
    saved = _Saved(settings=method.config.model_dump(mode="json"), data=method.info)
    (folder / "model.json").write_text(saved.model_dump_json(indent=1) + "\n")
    weights = {name: t.detach().cpu().contiguous().clone() for name, t in networks.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "measures.json").write_text(measures.model_dump_json(indent=1) + "\n")


def load_generative(artifact: Artifact, device: str = "cpu") -> tuple[GenerativeMethod, Any]:
    """Return the method and the networks of an artifact.

    Raises:
        ConfigError: the artifact is of another kind.
    """
    check_kind(artifact)
    saved = _Saved.model_validate_json(artifact.file("model.json").read_text())
    name = saved.settings["method"]
    config = parse_config(name, {key: value for key, value in saved.settings.items() if key != "method"})
    method = METHODS[name](config, saved.data)
    networks: Any = method.make_networks(generator(config.seed, "weights"))
    networks.load_state_dict(load_file(artifact.file("model.safetensors")))
    return method, networks.to(device).eval()


def draw_picture(
    artifact: Artifact,
    n: int,
    *,
    steps: int | None = None,
    sampler: str | None = None,
    label: str | None = None,
    guidance: float = 1.0,
    seed: int = 0,
) -> Pixels:
    """Return n samples of a model as a picture uint8 [H, W, 3]. label: name of a class.

    Raises:
        ConfigError: the artifact is of another kind, or the model has no such class or option.
    """
    machine = probe()
    machine.apply()
    method, networks = load_generative(artifact, machine.device)
    classes = method.info.classes
    if label is not None and label not in classes:
        expected = one_of(label, classes) if classes else "no label: it was trained without"
        raise ConfigError(f"{artifact.name} has no class {label!r}", expected=expected)
    labels = None if label is None else torch.full((n,), classes.index(label))
    options = DrawOptions(steps, cast(Sampler | None, sampler), labels, guidance)
    with torch.no_grad():
        drawn = method.sample(networks, n, generator(seed, "samples"), options).cpu()
    return draw_rows(drawn, method.info)


def decode_pictures(artifact: Artifact, read: Callable[[ImageShape], Pixels]) -> Pixels:
    """Return what a model is given and decodes of pictures, side by side, as one picture uint8 [H, W, 3].

    read: returns pixels uint8 [N, size, size, C] of a shape.

    Raises:
        ConfigError: the artifact is of another kind, or the model decodes no pictures.
    """
    machine = probe()
    machine.apply()
    method, networks = load_generative(artifact, machine.device)
    rows = to_rows(read(method.info.image_shape)).to(machine.device)
    with torch.no_grad():
        return draw_rows(method.show(networks, rows).cpu(), method.info)


def read_measures(artifact: Artifact) -> SavedMeasures:
    """Return the measures of an artifact. Raises ConfigError: it is of another kind."""
    check_kind(artifact)
    return SavedMeasures.model_validate_json(artifact.file("measures.json").read_text())


def check_kind(artifact: Artifact) -> None:
    """Raise ConfigError for an artifact that is no generative model; check its files."""
    if artifact.kind != KIND:
        raise ConfigError(
            f"{artifact.name} is of the kind {artifact.kind}", expected="a generative model",
            do="train one with `whorl gen train`, or list the artifacts with `whorl ls`",
        )  # fmt: skip
    artifact.check()
