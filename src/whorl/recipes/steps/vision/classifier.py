"""The step `image_classifier`: a ViT, ResNet or MLP-Mixer on images with labels. `whorl classify` uses the model.

[steps.image_classifier]
parents = ["images"]
network = { kind = "resnet", widths = [24, 48], depths = [1, 1] }     # or vit, mixer
"""

from __future__ import annotations

from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import Metrics
from whorl.recipes.steps.vision.results import class_table, open_images, train_rows_stage, weights_generator
from whorl.vision.config import NOT_HASHED, ImageClassifierConfig


@step("vision", config=ImageClassifierConfig, parents={"images": "images"}, not_hashed=NOT_HASHED)
def image_classifier(ctx: StepContext, config: ImageClassifierConfig) -> None:
    """Train a ViT, ResNet or MLP-Mixer on images with labels."""
    from whorl.vision.evaluate import confusion_matrix
    from whorl.vision.model import VisionConfig, VisionModel, build_network
    from whorl.vision.train import ClassifierTask

    found = open_images(ctx, "labels", config.threads)
    info, device = found.info, ctx.machine.device
    shape = VisionConfig(
        kind="classifier", network=config.network, width=len(info.classes), preprocessing=info.preprocessing,
        classes=info.classes,
    )  # fmt: skip
    network = build_network(shape, weights_generator(config.seed)).to(device)
    model = VisionModel("classifier", network, info.preprocessing, info.classes, config=shape)
    test = found.split("test")
    labels = test.labels
    assert labels is not None  # `ImageSet.need`

    def evaluate() -> Metrics:
        network.eval()
        matrix = confusion_matrix(model.classify(test.images)[1], labels)
        return {f"accuracy on {len(test):,} held-out images": float(matrix.trace() / matrix.sum())}

    train_rows_stage(ctx, "Training", ClassifierTask(network, found, config, device), evaluate)
    model.save(ctx.out)
    matrix = confusion_matrix(model.classify(test.images)[1], labels)
    ctx.report.blocks.append(class_table(ctx.name, info.classes, matrix, "images"))
