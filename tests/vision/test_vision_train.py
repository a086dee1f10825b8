"""Training of classifiers, CLIP and captioners: learning, gradients, batches, resume, replicas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.images import write_half_dark
from tests.support.vision_tasks import VIT, caption_task, classifier_task, contrastive_task

from whorl.errors import ConfigError
from whorl.train.rows import train_rows
from whorl.vision.config import MixerShape, ResNetShape
from whorl.vision.evaluate import confusion_matrix, exact_fraction, recall_at_1
from whorl.vision.image_set import ImageSet
from whorl.vision.train import augment, encode_captions, normalize

RESNET = ResNetShape(widths=(8, 8), depths=(1, 1))
MIXER = MixerShape(patch=4, d_model=16, n_layers=1, token_hidden=8, mlp_hidden=16)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return write_half_dark(tmp_path_factory.mktemp("labelled"), n=240)


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> ImageSet:
    return write_half_dark(tmp_path_factory.mktemp("captioned"), captions=True, n=240)


@pytest.mark.parametrize("network", [VIT, RESNET, MIXER])
def test_classifier_learns_half_dark_images(network: Any, labelled: ImageSet) -> None:
    test = labelled.split("test")
    task, model = classifier_task(labelled, network=network, steps=120, lr=1e-2)
    initial = {name: p.detach().clone() for name, p in task.networks.named_parameters()}
    train_rows(task)
    matrix = confusion_matrix(model.classify(test.images)[1], test.labels)
    assert matrix.trace() >= 0.9 * matrix.sum(), matrix
    # The last bias of a mixer has no effect: a layer norm removes it.
    same = [n for n, p in task.networks.named_parameters() if torch.equal(p, initial[n])]
    assert [n for n in same if not n.endswith("down.bias")] == []


def test_clip_learns_captions(captioned: ImageSet) -> None:
    test = captioned.split("test")
    texts = sorted(set(test.captions or ()))
    task, model = contrastive_task(captioned, steps=200, lr=5e-3)
    initial = {name: p.detach().clone() for name, p in task.networks.named_parameters()}
    train_rows(task)
    vectors, wanted = model.embed(test.images), model.embed_texts(texts)
    assert recall_at_1(vectors, wanted, texts, test.captions or ()) >= 0.9
    classes, probabilities = model.classify(test.images, texts)
    nearest = (vectors @ wanted.T).argmax(axis=1)
    assert [classes[i] for i in probabilities.argmax(dim=1)] == [texts[i] for i in nearest]
    moved = {n for n, p in task.networks.named_parameters() if not torch.equal(p, initial[n])}
    assert {n for n in initial if not n.startswith(("text.positions", "text.embedding"))} <= moved


def test_captioner_trains_only_its_cross_attention(captioned: ImageSet) -> None:
    test = captioned.split("test")
    task, model = caption_task(captioned, steps=300, lr=5e-3)
    initial = {name: p.detach().clone() for name, p in task.networks.named_parameters()}
    train_rows(task)
    moved = {n for n, p in task.networks.named_parameters() if not torch.equal(p, initial[n])}
    assert moved == {n for n in initial if n.startswith("bridges.")}
    assert exact_fraction(model.caption(test.images), test.captions or ()) >= 0.9


def test_batches_follow_from_the_step_number(labelled: ImageSet) -> None:
    task, _ = classifier_task(labelled, max_shift=2, flip=True)
    again, _ = classifier_task(labelled, max_shift=2, flip=True)
    for step in (0, 5, 11):
        for name, t in task.batch(step).items():
            assert torch.equal(t, again.batch(step)[name])
    assert not torch.equal(task.batch(0)["images"], task.batch(3)["images"])
    labels = torch.cat([task.batch(step)["labels"] for step in range(20)])  # one epoch of 240 images
    assert labels.bincount().tolist() == [80, 80, 80]


def test_augment_shifts_and_mirrors() -> None:
    pixels = torch.arange(2 * 4 * 4).reshape(2, 4, 4, 1).to(torch.uint8)
    rng = torch.Generator().manual_seed(0)
    assert torch.equal(augment(pixels, 0, False, rng), pixels)
    seen = set()
    for _ in range(200):
        shifted = augment(pixels, 1, True, rng)[0, :, :, 0]
        candidates = {}
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                rows, columns = ((torch.arange(4) + d).clamp(0, 3) for d in (down, right))
                moved = pixels[0, rows][:, columns, 0]
                candidates |= {(down, right, False): moved, (down, right, True): moved.flip(1)}
        seen |= {key for key, image in candidates.items() if torch.equal(image, shifted)}
    assert len(seen) == 18


def test_normalize_gives_mean_0_and_deviation_1(labelled: ImageSet) -> None:
    pixels = torch.from_numpy(labelled.split("train").images.copy())
    found = normalize(pixels, labelled.info.preprocessing)
    assert found.shape == (240, 3, 8, 8)
    torch.testing.assert_close(found.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.std((0, 2, 3)), torch.ones(3), atol=1e-3, rtol=0)


def test_long_captions_keep_their_end() -> None:
    ids, mask = encode_captions(["ab", "abcdef"], lambda text: [1, *text.encode(), 2], 5)
    assert ids.tolist() == [[1, 97, 98, 2, 0], [1, 97, 98, 99, 2]]
    assert mask.tolist() == [[True] * 4 + [False], [True] * 5]


def test_replicas_are_refused_where_they_change_the_loss(
    labelled: ImageSet, captioned: ImageSet, tmp_path: Path
) -> None:
    task, _ = contrastive_task(captioned, run={"replicas": 2})
    with pytest.raises(ConfigError, match=r"replicas is 2.*compares all pairs"):
        train_rows(task)
    task, _ = classifier_task(labelled, network=RESNET, run={"replicas": 2})
    with pytest.raises(ConfigError, match="differ between 2 replicas"):
        train_rows(task)


def test_captioner_refuses_images_of_another_size(captioned: ImageSet, tmp_path: Path) -> None:
    info = captioned.info.preprocessing
    other = info.model_copy(update={"shape": info.shape.model_copy(update={"size": 16})})
    with pytest.raises(ConfigError, match=r"(?s)images are 8 x 8 x 3.*16 x 16 x 3.*step `images`"):
        caption_task(captioned, preprocessing=other)
