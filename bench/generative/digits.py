"""Digits or letters by each family: a classifier trained on samples alone, and distances, on held-out pictures.

    python -m pip install scikit-learn
    python bench/generative/digits.py --seeds 1 --picture docs/generative_digits.png    # a quarter of an hour on 2 cores
    python bench/generative/digits.py --only vae --seeds 1
    python bench/generative/digits.py --data glyphs --patch 4 --seeds 1

As many samples as there are training digits, with the same labels, train the classifier of `classify-digits` (Ravuri &
Vinyals 2019, arXiv:1905.10887). The peer is that classifier trained on the real digits. The first seed of digits has
further figures: bits per dimension of 100 held-out digits, and for `ddpm` the distances of 20 steps of DDIM and of 1,000
ancestral ones. The picture has a row of samples of each method, in the order of BARS, above one of real digits. Two runs at
a time, with one thread each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from bench._run import claim, parse, sized

from whorl.data.quarantine import Quarantine
from whorl.generative.data import open_data, to_pixels
from whorl.generative.distances import frechet, sliced_wasserstein
from whorl.generative.measures import draw_measured, group_sizes, groups, likelihoods, measure
from whorl.generative.methods.method import DrawOptions
from whorl.generative.methods.registration import parse_config
from whorl.generative.pictures import encode_png, grid
from whorl.generative.task import GenerativeTask
from whorl.tracking.seeds import generator
from whorl.train.rows import train_rows
from whorl.vision.config import ImageClassifierConfig, ImagesConfig, ResNetShape
from whorl.vision.evaluate import confusion_matrix
from whorl.vision.image_set import ImageSet, ImageSplit, write_image_set
from whorl.vision.model import VisionConfig, VisionModel, build_network
from whorl.vision.sources import image_shape, make_splits
from whorl.vision.train import ClassifierTask

WIDTH = 64
BARS = {"flow": 0.95, "ddpm": 0.95, "score": 0.95, "gan": 0.90, "vae": 0.85, "vqvae": 0.85}  # least accuracy
LIKELIHOOD_ROWS = sized(100, 2)
SAMPLERS = {
    "DDIM": DrawOptions(steps=20, sampler="ddim"),
    "ancestral": DrawOptions(steps=sized(1000, 2), sampler="ancestral"),
}


def pictures(source: Any, folder: Path) -> ImageSet:
    """Write digits or glyphs into a folder."""
    config = ImagesConfig(source=source)
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


def run(
    folder: Path, method: str, settings: dict[str, object], classifier_steps: int
) -> tuple[dict[str, float], Tensor]:
    """Return the figures of a method with its seed, and samples of the classes [classes, 1, H, W]."""
    torch.set_num_threads(1)
    data = open_data("digits", folder)
    assert data.labels is not None
    task, began = (
        GenerativeTask(data, parse_config(method, {"width": WIDTH, **settings})),
        time.perf_counter(),
    )
    train_rows(task)
    figures, networks = {"seconds": time.perf_counter() - began}, task.networks.eval()
    with torch.no_grad():
        drawn = task.method.sample(
            networks, len(data.train), generator(0, "samples"), DrawOptions(labels=data.labels)
        )
        found = measure(draw_measured(task.method, networks, data, DrawOptions(), 0), data)
        for m in found:
            figures |= {m.name: m.value, f"{m.name} of real data": m.floor or 0.0}
        figures |= task.method.diagnose(networks, data)
        if settings["seed"] == 0 and data.info.shape[-1] == 8:
            figures |= {m.name: m.value for m in likelihoods(task.method, networks, data, LIKELIHOOD_ROWS)}
            if method == "ddpm":
                figures |= sampler_distances(task)
    figures["accuracy"] = accuracy(ImageSet(folder), drawn, data.labels, classifier_steps)
    return figures, one_of_each(drawn, data.labels)


def one_of_each(rows: Tensor, labels: Tensor) -> Tensor:
    """Return the first row of each class."""
    return torch.stack([rows[labels == label][0] for label in range(int(labels.max()) + 1)])


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
        parser.add_argument("--seeds", type=int, default=3)
        parser.add_argument("--only", default="", help="a method")
        parser.add_argument("--data", choices=("digits", "glyphs"), default="digits")
        parser.add_argument("--patch", type=int, default=2, help="side of a patch of the DiT")
        parser.add_argument("--steps", type=int, default=2000, help="of the model")
        parser.add_argument("--picture", type=Path, help="path of a PNG")

    args = parse(__doc__, arguments, smoke={"seeds": 1, "steps": 2, "classifier_steps": 2, "only": "vae"})
    classifier_steps = getattr(args, "classifier_steps", 660)
    methods = [method for method in BARS if args.only in ("", method)]
    settings = {"steps": args.steps, "patch": args.patch}
    suffix = "" if args.data == "digits" else f"-{args.data}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images = pictures(args.data, folder)
        data = open_data("digits", folder)
        assert data.labels is not None
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            jobs = [
                (
                    method,
                    pool.submit(run, folder, method, {**settings, "seed": seed}, classifier_steps),
                )
                for seed in range(args.seeds)
                for method in methods
            ]
            real = accuracy(images, data.train, data.labels, classifier_steps)
            print(f"real {args.data}: {real:.3f}", flush=True)
            records: dict[str, list[dict[str, float]]] = {method: [] for method in methods}
            shown = dict[str, Tensor]()
            for method, job in jobs:
                figures, rows = job.result()
                records[method].append(figures)
                shown.setdefault(method, rows)
                text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                print(f"{method}: {text}", flush=True)
        if args.picture:
            rows = torch.cat([*shown.values(), one_of_each(data.test, data.test_labels)])
            args.picture.write_bytes(encode_png(grid(to_pixels(rows), len(data.info.classes))))
    for method, found in records.items():
        mean, bar = statistics.fmean(figures["accuracy"] for figures in found), BARS[method]
        claim(
            f"{args.data}: accuracy of a classifier trained on samples of {method} alone", ours=mean, peer=real,
            peer_name=f"real {args.data}", unit="", ratio=mean, bar=bar, ok=mean >= bar, variant=method + suffix,
            samples=found,
        )  # fmt: skip
    if "vqvae" in records:
        used = statistics.fmean(figures["codes_used"] for figures in records["vqvae"])
        claim(
            f"{args.data}: share of the codes of vqvae in use", ours=used, peer=1.0, unit="share", ratio=used, bar=0.8,
            ok=used >= 0.8, variant=f"codes{suffix}",
        )  # fmt: skip
    if "ddpm" in records and args.data == "digits":
        few, many = (records["ddpm"][0][f"sliced_wasserstein, {name}"] for name in SAMPLERS)
        claim(
            "digits: sliced Wasserstein distance of 20 steps of DDIM against 1,000 ancestral ones", ours=few, peer=many,
            peer_name="ancestral", unit="", ratio=few / many, bar=1.2, ok=few <= 1.2 * many, variant="samplers",
        )  # fmt: skip


if __name__ == "__main__":
    main()
