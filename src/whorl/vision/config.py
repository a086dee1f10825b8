"""Settings of image sets, networks and training. Imports no torch, so a recipe is checked fast."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from whorl.data.images import MAX_PIXELS
from whorl.train.config import ROWS_NOT_HASHED, RowTrainConfig, RunConfig

# Default side of an image in pixels, by source.
NATIVE_SIZE = {"digits": 8, "scenes": 32, "glyphs": 16, "shapes": 16, "files": 64}


class ImagesConfig(BaseModel):
    """Source, shape and splits of a set of images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: Literal["files", "digits", "scenes", "glyphs", "shapes"] = Field(
        default="files",
        description="files, scikit-learn's digits, drawn scenes with captions, drawn letters, or drawn shapes",
    )
    path: str = Field(
        default="",
        description="files: FOLDER/CLASS/*.png, or a JSONL or Parquet file of images with captions or labels",
    )
    test_path: str = Field(
        default="", description="files: held-out images; default: a fraction of those in path"
    )
    test_fraction: float = Field(default=0.2, gt=0, lt=1, description="held-out fraction, of each class")
    image_field: str = Field(default="image", description="JSONL, Parquet: a path, or the bytes of a file")
    label_field: str = Field(default="label", description="JSONL, Parquet: the class")
    caption_field: str = Field(default="caption", description="JSONL, Parquet: the text")
    size: int = Field(default=0, ge=0, le=1024, description="side in pixels; 0: 8 to 64, by source")
    channels: Literal[0, 1, 3] = Field(
        default=0, description="1 grey, 3 RGB; 0: RGB for scenes and files, else grey"
    )
    fit: Literal["crop", "pad", "stretch"] = Field(
        default="crop", description="how an image becomes a square"
    )
    max_pixels: int = Field(default=MAX_PIXELS, ge=1, description="larger files go to the quarantine")
    train_scenes: int = Field(default=8000, ge=1, description="drawn images to train on")
    test_scenes: int = Field(default=1000, ge=1, description="drawn images that are held out")
    held_out_captions: int = Field(
        default=20, ge=1, le=60, description="scenes: captions that occur in no training image"
    )
    seed: int = Field(default=0, ge=0)
    content_hash: str = Field(default="", description="of the files; computed")

    @model_validator(mode="after")
    def _possible(self) -> ImagesConfig:
        if (self.source == "files") != bool(self.path):
            raise ValueError('path and source = "files" must be given together')
        if self.source == "digits" and (self.size or 8, self.channels or 1) != (8, 1):
            raise ValueError("digits are grey images of 8 x 8: leave size and channels out")
        if self.source not in ("digits", "files") and self.side < 16:
            raise ValueError(f"size ({self.size}) is too small for drawn {self.source}: at least 16")
        if self.source == "scenes" and self.channels == 1:
            raise ValueError("scenes are coloured: leave channels out")
        return self

    @property
    def side(self) -> int:
        """Side of an image in pixels."""
        return self.size or NATIVE_SIZE[self.source]

    @property
    def depth(self) -> int:
        """Number of channels."""
        return self.channels or (3 if self.source in ("scenes", "files") else 1)


class ViTShape(BaseModel):
    """A vision transformer. With pooling = "class" it can be exported to transformers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["vit"] = "vit"
    patch: int = Field(default=2, ge=1, description="side of a patch, a divisor of the image's side")
    d_model: int = Field(default=64, ge=1)
    n_layers: int = Field(default=3, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=128, ge=1)
    pooling: Literal["class", "mean"] = "class"


class ResNetShape(BaseModel):
    """A residual network; every stage but the first halves the sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["resnet"] = "resnet"
    widths: tuple[int, ...] = Field(default=(24, 48), min_length=1, description="channels of each stage")
    depths: tuple[int, ...] = Field(default=(1, 1), min_length=1, description="blocks of each stage")
    stem: Literal["small", "large"] = "small"
    pre_activation: bool = False


class MixerShape(BaseModel):
    """An MLP-Mixer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["mixer"] = "mixer"
    patch: int = Field(default=2, ge=1)
    d_model: int = Field(default=64, ge=1)
    n_layers: int = Field(default=3, ge=1)
    token_hidden: int = Field(default=32, ge=1)
    mlp_hidden: int = Field(default=128, ge=1)


NetworkShape = Annotated[ViTShape | ResNetShape | MixerShape, Field(discriminator="kind")]


class TextTowerShape(BaseModel):
    """CLIP's text encoder."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    d_model: int = Field(default=64, ge=8)
    n_layers: int = Field(default=2, ge=1)
    n_heads: int = Field(default=4, ge=1)
    mlp_hidden: int = Field(default=128, ge=8)
    max_length: int = Field(
        default=32, ge=3, description="ids of a caption, with begin and end; longer ones are cut"
    )


class VisionTrainConfig(RowTrainConfig):
    """Training of an image model with AdamW."""

    max_shift: int = Field(
        default=0, ge=0, description="augmentation: shift by up to so many pixels in each direction"
    )
    flip: bool = Field(
        default=False, description="augmentation: mirror half of the images; not where left and right matter"
    )
    run: RunConfig = Field(
        default=RunConfig(),
        description="checkpoints and processes; CLIP and networks with batch norm have no replicas",
    )


class ImageClassifierConfig(VisionTrainConfig):
    """Network and training of a classifier."""

    network: NetworkShape = ViTShape()
    label_smoothing: float = Field(default=0.1, ge=0, lt=1)


class ContrastiveConfig(VisionTrainConfig):
    """Towers and training of a CLIP."""

    network: NetworkShape = ViTShape(patch=8)
    text: TextTowerShape = TextTowerShape()
    d_joint: int = Field(default=32, ge=2, description="width of the common space")
    vocab_size: int = Field(default=320, ge=260, description="of the captions' tokenizer, at most")


class CaptionerConfig(VisionTrainConfig):
    """Cross-attention and training of a captioner."""

    lr: float = Field(default=2e-3, gt=0, description="peak learning rate")
    weight_decay: float = Field(default=0.0, ge=0, description="of weight matrices")
    cross_attn_every: int = Field(
        default=1, ge=1, description="blocks of the language model per cross-attention layer"
    )
    max_length: int = Field(
        default=64, ge=3, description="ids of a caption, with begin and end; longer ones are cut"
    )


NOT_HASHED = ROWS_NOT_HASHED
