"""The step `text_classifier`: a sentence classifier on labelled texts. `whorl classify` uses the model.

[steps.text_classifier]
path = "reviews.jsonl"        # records with the fields text and label; also .parquet, or a folder of such files
"""

from __future__ import annotations

from pathlib import Path

from whorl.embedding.config import TextClassifierConfig
from whorl.recipes.registry import StepContext, step
from whorl.recipes.stage import Metrics
from whorl.recipes.steps.vision.results import class_table, train_rows_stage, weights_generator
from whorl.store import Store
from whorl.train.config import ROWS_NOT_HASHED


def _with_content_hash(config: TextClassifierConfig, store: Store) -> TextClassifierConfig:
    from whorl.align.data.dataset_files import content_hash

    return config.model_copy(update={"content_hash": content_hash(Path(config.path).expanduser())})


@step(
    "text_classifier",
    config=TextClassifierConfig,
    complete_config=_with_content_hash,
    not_hashed=ROWS_NOT_HASHED,
)
def text_classifier(ctx: StepContext, config: TextClassifierConfig) -> None:
    """Train a sentence classifier (encoder, mean over tokens) on labelled texts."""
    import numpy as np
    import torch

    from whorl.data.labelled import held_out, read_labelled
    from whorl.data.quarantine import Quarantine
    from whorl.embedding.classifier import TextClassifier, TextClassifierTask
    from whorl.models.encoder import Encoder, EncoderConfig
    from whorl.tokens.tokenizer import Tokenizer
    from whorl.vision.evaluate import confusion_matrix

    quarantine = Quarantine(ctx.out / "quarantine.jsonl")
    path = Path(config.path).expanduser()
    texts, names = zip(*read_labelled(path, config.text_field, config.label_field, quarantine), strict=True)
    is_test = held_out(names, [text.encode() for text in texts], config.test_fraction, config.seed, "texts")
    classes = tuple(sorted(set(names)))
    labels = np.array([classes.index(name) for name in names], np.int64)
    train, test = (
        [text for text, out in zip(texts, is_test, strict=True) if out == part] for part in (False, True)
    )
    ctx.machine.apply()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = Tokenizer.train(train, config.vocab_size)
    shape = {
        name: getattr(config, name) for name in ("d_model", "n_layers", "n_heads", "mlp_hidden", "max_length")
    }
    encoder = Encoder(
        EncoderConfig(vocab_size=tokenizer.vocab_size, n_classes=len(classes), **shape),
        weights_generator(config.seed),
    ).to(ctx.machine.device)
    model = TextClassifier(encoder, tokenizer, classes)
    cut = sum(len(tokenizer.encode(text)) > config.max_length for text in texts)

    def confusion() -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        encoder.eval()
        return confusion_matrix(model.classify(test), labels[is_test])

    def evaluate() -> Metrics:
        matrix = confusion()
        return {f"accuracy on {len(test):,} held-out texts": float(matrix.trace() / matrix.sum())}

    task = TextClassifierTask(
        encoder, model.encode(train), torch.from_numpy(labels[~is_test]), config, ctx.machine.device,
        config.content_hash,
    )  # fmt: skip
    train_rows_stage(ctx, "Training", task, evaluate)
    model.save(ctx.out)
    ctx.report.blocks.append(class_table(ctx.name, classes, confusion(), task.unit))
    ctx.summary.update(classes=list(classes), cut=cut, quarantine=quarantine.summary())
    if cut:
        ctx.summary["headline"] += f"; {cut:,} texts cut to {config.max_length} ids"
    if len(quarantine):
        ctx.summary["headline"] += f"; {len(quarantine):,} in quarantine"
