"""The steps `clip` and `captioner`. `whorl classify --labels`, `whorl embed` and `whorl caption` use the models.

[steps.clip]                        # an image tower and a text tower with one space
parents = ["images"]

[steps.captioner]                   # cross-attention from a frozen language model to the frozen image tower
parents = ["images", "clip", "sft"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import Metrics
from whorl.recipes.steps.vision.results import SECTION, open_images, train_rows_stage, weights_generator
from whorl.report import Cell, Column, Table
from whorl.vision.config import NOT_HASHED, CaptionerConfig, ContrastiveConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from whorl.vision.image_set import ImageSet

SHOWN_CAPTIONS = 8  # held-out images whose captions the report shows


def _held_out(found: ImageSet) -> dict[str, str]:
    """Return the held-out splits with their description."""
    described = {"test": "held-out images", "new_captions": "images of new captions"}
    return {name: described.get(name, name) for name in found.splits if name != "train"}


@step("vision", config=ContrastiveConfig, parents={"images": "images"}, not_hashed=NOT_HASHED)
def clip(ctx: StepContext, config: ContrastiveConfig) -> None:
    """Train an image tower and a text tower on images with captions (CLIP)."""
    from whorl.models.encoder import EncoderConfig
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.vision.evaluate import recall_at_1
    from whorl.vision.model import VisionConfig, VisionModel, build_clip
    from whorl.vision.train import ContrastiveTask

    found = open_images(ctx, "captions", config.threads)
    info, device, captions = found.info, ctx.machine.device, found.split("train").captions or ()
    tokenizer = Tokenizer.train(captions, config.vocab_size)
    text = EncoderConfig(
        vocab_size=tokenizer.vocab_size, causal=True, end_id=tokenizer.eos_id, **config.text.model_dump()
    )
    shape = VisionConfig(
        kind="clip", network=config.network, width=config.d_joint, preprocessing=info.preprocessing, text=text,
        clip_tower=True,
    )  # fmt: skip
    network = build_clip(shape, weights_generator(config.seed)).to(device)
    model = VisionModel("clip", network, info.preprocessing, tokenizer=tokenizer, config=shape)
    splits = {name: found.split(name) for name in _held_out(found)}
    texts = sorted({text for name in found.splits for text in found.split(name).captions or ()})

    def evaluate() -> Metrics:
        network.eval()
        vectors = model.embed_texts(texts)
        return {
            f"recall@1 of {len(texts):,} captions, {_held_out(found)[name]}": recall_at_1(
                model.embed(split.images), vectors, texts, split.captions or ()
            )
            for name, split in splits.items()
        }

    task = ContrastiveTask(network, found, model.encode_captions(captions), config, device)
    train_rows_stage(ctx, "Training", task, evaluate)
    model.save(ctx.out)


@step(
    "vision",
    config=CaptionerConfig,
    parents={"images": "images", "vision": "vision", "model": "model"},
    not_hashed=NOT_HASHED,
)
def captioner(ctx: StepContext, config: CaptionerConfig) -> None:
    """Train cross-attention between a frozen language model and a frozen ViT to caption images (Flamingo)."""
    from whorl.models import load_model
    from whorl.models.vision.flamingo import Captioner
    from whorl.tokens.hf_tokenizer import load_tokenizer
    from whorl.vision.evaluate import exact_fraction
    from whorl.vision.load import load_vision
    from whorl.vision.model import VisionModel
    from whorl.vision.train import CaptionTask

    found = open_images(ctx, "captions", config.threads)
    device, folder = ctx.machine.device, ctx.parent_folder("model")
    tower = load_vision(ctx.parent_folder("vision"), device)
    tokenizer = load_tokenizer(folder)
    network = Captioner(
        load_model(folder, device=device, to_train=True), tower.image_tower,
        cross_attn_every=config.cross_attn_every, generator=weights_generator(config.seed),
    ).to(device)  # fmt: skip
    shape = tower.own_config().model_copy(
        update={
            "kind": "captioner", "classes": (), "text": None, "cross_attn_every": config.cross_attn_every,
            "max_length": config.max_length,
        }
    )  # fmt: skip
    model = VisionModel("captioner", network, tower.preprocessing, tokenizer=tokenizer, config=shape)
    splits = {name: found.split(name) for name in _held_out(found)}
    written: dict[str, list[str]] = {}

    def evaluate() -> Metrics:
        network.eval()
        written.update({name: model.caption(split.images) for name, split in splits.items()})
        return {
            f"captions exactly right, {_held_out(found)[name]}": exact_fraction(
                written[name], split.captions or ()
            )
            for name, split in splits.items()
        }

    captions = model.encode_captions(found.split("train").captions or ())
    task = CaptionTask(network, found, captions, config, tower.preprocessing, device)
    train_rows_stage(ctx, "Training", task, evaluate, loss="nll")
    model.save(ctx.out)
    ctx.report.blocks.append(_caption_table(ctx.name, written["test"], splits["test"].captions or ()))


def _caption_table(name: str, written: Sequence[str], expected: Sequence[str]) -> Table:
    rows: list[list[Cell]] = [
        [found, wanted, "right" if found == wanted else "wrong"]
        for found, wanted in zip(written[:SHOWN_CAPTIONS], expected, strict=False)
    ]
    columns = [Column(name="Written"), Column(name="Caption of the image"), Column(name="")]
    return Table(section=SECTION, title=f"{name}: the first held-out images", columns=columns, rows=rows)
