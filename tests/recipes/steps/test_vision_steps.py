"""The steps of images: artifacts, reports, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench.vision._recipes import run_seed
from bench.vision.digits import NETWORKS
from tests.support.images import write_class_folders
from tests.support.recipes.align_steps import run_text

from whorl.errors import ConfigError, DataError
from whorl.recipes import load_recipe
from whorl.vision.image_set import ImageSet
from whorl.vision.load import load_vision

CLASSES = """
name = "shapes"
[steps.images]
path = "shapes"
size = 8
[steps.image_classifier]
parents = ["images"]
network = { kind = "vit", patch = 4, d_model = 16, n_layers = 1, n_heads = 2, mlp_hidden = 16 }
steps = 100
batch_size = 12
lr = 1e-2
threads = 1
run.checkpoint_seconds = 0.01
[steps.report]
parents = ["image_classifier"]
"""
SCENES = """
name = "drawn"
[steps.images]
source = "scenes"
train_scenes = 200
test_scenes = 24
[steps.clip]
parents = ["images"]
network = { kind = "vit", patch = 8, d_model = 16, n_layers = 1, n_heads = 2, mlp_hidden = 16 }
text = { d_model = 16, n_layers = 1, n_heads = 2, mlp_hidden = 16 }
steps = 6
threads = 1
[steps.image_captions]
parents = ["images"]
[steps.init_model]
d_model = 16
n_layers = 1
n_heads = 2
mlp_hidden = 16
[steps.sft]
parents = ["init_model", "image_captions"]
data.seq_len = 64
model.dtype = "float32"
eval_tasks = 0
[steps.captioner]
parents = ["images", "clip", "sft"]
steps = 4
threads = 1
[steps.report]
parents = ["clip", "captioner"]
"""


@pytest.fixture(scope="module", autouse=True)
def _in_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in a folder with images of three classes, one of them damaged."""
    folder = tmp_path_factory.mktemp("vision")
    write_class_folders(folder / "shapes", n=12)
    (folder / "shapes" / "top" / "bad.png").write_text("no image")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield


def test_classifier_from_a_folder_learns_and_reports() -> None:
    made = run_text(CLASSES)
    images, model = made["images"], made["image_classifier"]
    assert images.kind == "images" and images.summary["headline"] == (
        "30 to train, 6 to test; 8 x 8 x 3; 3 classes; 1 in quarantine"
    )
    assert "shapes/top/bad.png" in images.file("quarantine.jsonl").read_text()
    assert ImageSet(images.path).classes == ("bottom", "left", "top")
    (name, after), before = *model.summary["eval"]["after"].items(), model.summary["eval"]["before"]
    assert name == "accuracy on 6 held-out images" and after >= 5 / 6 > before[name]
    assert load_vision(model.path).classes == ("bottom", "left", "top")
    page = made["report"].file("report.html").read_text()
    for text in ("Held-out images", "image_classifier: classes", "Objective classification", "Quarantine"):
        assert text in page, text


def test_changed_image_gives_another_set() -> None:
    before = run_text(CLASSES)["images"]
    path = Path("shapes/left/0.png")
    data = path.read_bytes()
    try:
        path.write_bytes(Path("shapes/left/1.png").read_bytes())
        assert run_text(CLASSES)["images"].address != before.address
    finally:
        path.write_bytes(data)
    assert run_text(CLASSES)["images"].address == before.address


def test_scenes_recipe_makes_clip_and_captioner() -> None:
    made = run_text(SCENES)
    clip, captioner = made["clip"], made["captioner"]
    assert [*clip.summary["eval"]["after"]] == [
        "recall@1 of 112 captions, held-out images", "recall@1 of 112 captions, images of new captions",
    ]  # fmt: skip
    assert {"captions exactly right, held-out images"} < set(captioner.summary["eval"]["before"])
    model, tower = load_vision(captioner.path), load_vision(clip.path)
    test = ImageSet(made["images"].path).split("test")
    assert len(model.caption(test.images[:2])) == 2
    assert (model.embed(test.images) == load_vision(captioner.path).embed(test.images)).all()
    own, frozen = model.network.state_dict(), tower.network.state_dict()
    assert all(own[n].equal(t) for n, t in frozen.items() if n.startswith("image."))
    lines = made["image_captions"].file("pairs.train.jsonl").read_text().splitlines()
    assert len(lines) == 92 and set(json.loads(lines[0])) == {"completion"}
    page = made["report"].file("report.html").read_text()
    assert "captioner: the first held-out images" in page and "Objective info_nce" in page


@pytest.mark.parametrize(
    ("text", "setting", "kind", "message"),
    [
        (CLASSES, "images.path=none", DataError, "none does not exist"),
        (CLASSES, "image_classifier.network.patch=3", ConfigError, "patch is 3.*does not divide image_size, 8"),
        (CLASSES, "image_classifier.batch_size=1", ConfigError, "batch_size cannot be"),
        (SCENES, "captioner.cross_attn_every=0", ConfigError, "cross_attn_every cannot be"),
        (SCENES, "clip.vocab_size=10", ConfigError, "vocab_size cannot be"),
        (SCENES, "images.size=8", ConfigError, "too small for drawn scenes"),
    ],
)  # fmt: skip
def test_steps_refuse_invalid_settings(text: str, setting: str, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=f"(?s){message}"):
        run_text(text, setting)


def test_labels_and_captions_are_not_confused() -> None:
    with pytest.raises(ConfigError, match=r"(?s)clip needs captions.*labels only"):
        run_text(CLASSES.replace("image_classifier", "clip").replace("lr = 1e-2", ""))
    classify = '[steps.image_classifier]\nparents = ["images"]\n'
    with pytest.raises(ConfigError, match=r"(?s)image_classifier needs labels.*captions only"):
        run_text(SCENES[: SCENES.index("[steps.clip]")] + classify)


def test_classify_digits_learns(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    sets = [setting for setting in NETWORKS["mixer"] if ".steps" not in setting]
    made = run_seed("classify-digits", 0, tmp_path, [*sets, "classifier.steps=200"], "classifier")
    (accuracy,) = made["classifier"].summary["eval"]["after"].values()
    assert accuracy >= 0.8


def test_shipped_recipes_have_the_documented_steps() -> None:
    assert [*load_recipe("classify-digits").steps] == ["images", "classifier", "report"]
    assert {"clip", "sft", "captioner"} <= set(load_recipe("caption-scenes").steps)
