"""Digits by each family: a classifier trained on samples alone, and distances, on held-out digits.

    python -m pip install scikit-learn
    python bench/generative/digits.py                     # every family, five seeds: hours on 2 cores
    python bench/generative/digits.py --only vae --seeds 1

As many samples as there are training digits, with the same labels, train the classifier of `classify-digits` (Ravuri &
Vinyals 2019, arXiv:1905.10887). The peer is that classifier trained on the real digits. Bits per dimension are those of
100 held-out digits. For `ddpm`, 20 steps of DDIM are compared with 1,000 ancestral ones, and for `vqvae` a claim has
the share of its codes in use.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.data.quarantine import Quarantine
from whorl.generative.data import Data, open_data, to_pixels
from whorl.generative.distances import frechet, sliced_wasserstein
from whorl.generative.measures import draw_measured, group_sizes, groups, likelihoods, measure
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.task import GenerativeTask
from whorl.tracking.seeds import generator
from whorl.train.rows import train_rows
from whorl.vision.config import ImageClassifierConfig, ImagesConfig, ResNetShape
from whorl.vision.evaluate import confusion_matrix
from whorl.vision.image_set import ImageSet, ImageSplit, write_image_set
from whorl.vision.model import VisionConfig, VisionModel, build_network
from whorl.vision.sources import image_shape, make_splits
from whorl.vision.train import ClassifierTask

# Method -> least accuracy, settings.
BARS: dict[str, tuple[float, dict[str, object]]] = {
    "flow": (0.95, {"width": 64}),
    "ddpm": (0.95, {"width": 64}),
    "gan": (0.90, {"width": 64}),
    "vae": (0.85, {"width": 64}),
    "vqvae": (0.85, {"width": 64}),
}
LIKELIHOOD_ROWS = sized(100, 2)
SAMPLERS = {
    "DDIM": DrawOptions(steps=20, sampler="ddim"),
    "ancestral": DrawOptions(steps=sized(1000, 2), sampler="ancestral"),
}


def digits(folder: Path) -> ImageSet:
    config = ImagesConfig(source="digits")
    splits, classes = make_splits(config, Quarantine(folder / "quarantine.jsonl"))
    return write_image_set(folder, splits, classes, image_shape(config))


def accuracy(images: ImageSet, rows: Tensor, labels: Tensor, steps: int) -> float:
    """Accuracy on held-out digits of a classifier trained on rows [N, 1, 8, 8] with labels [N]."""
    with tempfile.TemporaryDirectory() as folder:
        split = ImageSplit(to_pixels(rows), labels.numpy())
        sampled = write_image_set(
            Path(folder), {"train": split, "test": images.split("test")}, images.classes, images.info.preprocessing.shape
        )  # fmt: skip
        config = ImageClassifierConfig(
            network=ResNetShape(), steps=steps, lr=4e-3, max_shift=1, threads=1, batch_size=64
        )
        info = sampled.info
        shape = VisionConfig(
            kind="classifier", network=config.network, width=len(info.classes), preprocessing=info.preprocessing,
            classes=info.classes,
        )  # fmt: skip
        network = build_network(shape, generator(0, "weights"))
        train_rows(ClassifierTask(network, sampled, config))
        network.eval()
        model = VisionModel("classifier", network, info.preprocessing, info.classes, config=shape)
        test = sampled.split("test")
        assert test.labels is not None
        matrix = confusion_matrix(model.classify(test.images)[1], test.labels)
    return float(matrix.trace() / matrix.sum())


def samples(data: Data, method: str, settings: dict[str, object]) -> tuple[Tensor, dict[str, float]]:
    """Return labelled samples, and the measures of unlabelled ones with the seconds of training."""
    task, began = GenerativeTask(data, parse_config(method, settings)), time.perf_counter()
    train_rows(task)
    seconds = time.perf_counter() - began
    task.networks.eval()
    rng = generator(0, "samples")
    with torch.no_grad():
        drawn = task.method.sample(task.networks, len(data.train), rng, DrawOptions(labels=data.labels))
        found = measure(draw_measured(task.method, task.networks, data, DrawOptions(), 0), data)
        figures = {m.name: m.value for m in found} | {f"{m.name} of real data": m.floor or 0.0 for m in found}
        figures |= task.method.diagnose(task.networks, data)
        if method == "ddpm":
            figures |= sampler_distances(task)
    figures |= {m.name: m.value for m in likelihoods(task.method, task.networks, data, LIKELIHOOD_ROWS)}
    return drawn, {"seconds": seconds, **figures}


def sampler_distances(task: GenerativeTask) -> dict[str, float]:
    """Return distances of unlabelled samples to held-out digits, with few steps of DDIM and with many ancestral ones."""
    found, (size, _) = dict[str, float](), group_sizes(task.data)
    target = task.data.test[:size].flatten(1)
    for name, options in SAMPLERS.items():
        drawn = draw_measured(task.method, task.networks, task.data, options, 0).flatten(1)
        for distance in (sliced_wasserstein, frechet):
            values = [distance(part, target) for part in groups(drawn, size)]
            found[f"{distance.__name__}, {name}"] = statistics.fmean(values)
    return found


def main() -> None:
    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)
        parser.add_argument("--only", default="", help="a method")
        parser.add_argument("--steps", type=int, default=0, help="of the model; default: this script's")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 2, "classifier_steps": 2, "only": "vae"})
    torch.set_num_threads(1)
    classifier_steps = getattr(args, "classifier_steps", 660)
    with tempfile.TemporaryDirectory() as folder:
        images = digits(Path(folder))
        data = open_data("digits", Path(folder))
        assert data.labels is not None
        real = accuracy(images, data.train, data.labels, classifier_steps)
        print(f"real digits: {real:.3f}", flush=True)
        for method, (bar, settings) in BARS.items():
            if args.only not in ("", method):
                continue
            values, records = list[float](), list[dict[str, float]]()
            for seed in range(args.seeds):
                steps = {"steps": args.steps} if args.steps else {}
                drawn, figures = samples(data, method, {**settings, **steps, "seed": seed})
                values.append(accuracy(images, drawn, data.labels, classifier_steps))
                records.append({"accuracy": values[-1], **figures})
                text = ", ".join(f"{name} {value:.3g}" for name, value in records[-1].items())
                print(f"{method}, seed {seed}: {text}", flush=True)
            mean = statistics.fmean(values)
            claim(
                f"digits: accuracy of a classifier trained on samples of {method} alone", ours=mean, peer=real,
                peer_name="real digits", unit="", ratio=mean, bar=bar, ok=mean >= bar, variant=method, samples=records,
            )  # fmt: skip

            if method == "vqvae":
                used = statistics.fmean(record["codes_used"] for record in records)
                claim(
                    "digits: share of the codes of vqvae in use", ours=used, peer=1.0, unit="share", ratio=used, bar=0.8,
                    ok=used >= 0.8, variant="codes",
                )  # fmt: skip
            if method == "ddpm":
                few, many = (
                    statistics.fmean(record[f"sliced_wasserstein, {name}"] for record in records)
                    for name in SAMPLERS
                )
                claim(
                    "digits: sliced Wasserstein distance of 20 steps of DDIM against 1,000 ancestral ones", ours=few,
                    peer=many, peer_name="ancestral", unit="", ratio=few / many, bar=1.2, ok=few <= 1.2 * many,
                    variant="samplers",
                )  # fmt: skip


if __name__ == "__main__":
    main()
