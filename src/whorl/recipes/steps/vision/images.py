"""The steps `images` and `image_captions`: a set of images with labels or captions, and its captions as texts.

    [steps.images]
    path = "photos"            # photos/CLASS/*.png; or pairs.jsonl, pairs.parquet with the fields image and caption

    [steps.images]
    source = "digits"          # scikit-learn's; or drawn: "glyphs", "shapes", and "scenes" with captions

The content of the files is part of the address: a changed image gives another set.
"""

from __future__ import annotations

from collections import Counter

from pydantic import BaseModel, ConfigDict, Field

from whorl.recipes.registry import StepContext, step
from whorl.report import Cell, Column, Facts, Table
from whorl.store import Store
from whorl.vision.config import ImagesConfig

SECTION = "Images"


def _with_content_hash(config: ImagesConfig, store: Store) -> ImagesConfig:
    if config.source != "files":
        return config
    from whorl.vision.sources import content_hash

    return config.model_copy(update={"content_hash": content_hash(config)})


@step("images", config=ImagesConfig, complete_config=_with_content_hash)
def images(ctx: StepContext, config: ImagesConfig) -> None:
    """Read or draw images, make them squares of one size, and split them."""
    from whorl.data.quarantine import Quarantine
    from whorl.vision.image_set import write_image_set
    from whorl.vision.sources import image_shape, make_splits

    quarantine = Quarantine(ctx.out / "quarantine.jsonl")
    with ctx.progress.task("Reading", total=None, unit="images") as bar:
        splits, classes = make_splits(
            config, quarantine, lambda n: bar.update(done=n, note=f"{len(quarantine):,} in quarantine")
        )
    for first in list(quarantine)[:3]:
        ctx.progress.log(f"    in quarantine: {first}")
    found = write_image_set(ctx.out, splits, classes, image_shape(config))
    counts = ", ".join(
        f"{n:,} to {'train' if name == 'train' else name}" for name, n in found.info.rows.items()
    )
    shape = found.info.preprocessing.shape
    size = f"{shape.size} x {shape.size} x {shape.channels}"
    headline = f"{counts}; {size}" + (f"; {len(classes)} classes" if classes else "")
    if len(quarantine):
        headline += f"; {len(quarantine):,} in quarantine"
    facts = [
        ("source", config.path or config.source),
        ("shape", size),
        *((f"split {n}", f"{k:,}") for n, k in found.info.rows.items()),
    ]
    ctx.report.blocks.append(Facts(section=SECTION, rows=facts))
    labels = splits["train"].labels
    if labels is not None:
        of_class = Counter(labels.tolist())
        rows: list[list[Cell]] = [[name, f"{of_class[number]:,}"] for number, name in enumerate(classes)]
        columns = [Column(name="Class"), Column(name="Images to train on", number=True)]
        ctx.report.blocks.append(Table(section=SECTION, title="Classes", columns=columns, rows=rows))
    if len(quarantine):
        reasons: list[list[Cell]] = [[reason, f"{n:,}"] for reason, n in quarantine.counts.most_common()]
        columns = [Column(name="Reason"), Column(name="Files", number=True)]
        ctx.report.blocks.append(Table(section=SECTION, title="Quarantine", columns=columns, rows=reasons))
    ctx.summary.update(
        rows=found.info.rows, classes=list(classes), quarantine=quarantine.summary(), headline=headline
    )


class ImageCaptionsConfig(BaseModel):
    """How the captions become texts for `sft`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_test: int = Field(default=128, ge=1, description="held-out captions, at most")


@step("tasks", config=ImageCaptionsConfig, parents={"images": "images"})
def image_captions(ctx: StepContext, config: ImageCaptionsConfig) -> None:
    """Write the captions of images as texts, for a language model that a captioner builds on."""
    from whorl.align.data.dataset_files import write_dataset
    from whorl.align.data.formats import PromptCompletion
    from whorl.vision.image_set import ImageSet

    found = ImageSet(ctx.parent_folder("images"))
    found.need("captions", "image_captions")
    counts = {}
    for split, limit in (("train", None), ("test", config.max_test)):
        captions = list(dict.fromkeys(found.split(split).captions or ()))[:limit]
        counts[split] = write_dataset(
            ctx.out, "pairs", split, [PromptCompletion("", text) for text in captions]
        )
    ctx.summary.update(counts=counts, headline=f"{counts['train']:,} different captions to train on")
