"""ViT and CLIP in and out, held against their own library: the same logits and vectors, there and back."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from whorl.errors import CheckpointError, ConfigError
from whorl.models.bridges import DualEncoder
from whorl.models.encoder import Encoder, EncoderConfig
from whorl.models.exchange import VISION_FAMILIES, export_vision, import_vision, read_vision_config
from whorl.models.resnet import ResNet
from whorl.models.vision import ViT
from whorl.objectives.contrastive import info_nce

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

VIT: dict[str, Any] = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": 16,
    "patch_size": 4, "num_labels": 5,
}  # fmt: skip
END = 89
TEXT: dict[str, Any] = {
    "vocab_size": 90, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 10, "eos_token_id": END, "pad_token_id": 7, "bos_token_id": 3,
}  # fmt: skip
IMAGE: dict[str, Any] = {key: value for key, value in VIT.items() if key != "num_labels"}
CLIP: dict[str, Any] = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 12}
# name -> (their class, their configuration's, its fields)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", VIT),
    "vit-gelu-new": ("ViTForImageClassification", "ViTConfig", {**VIT, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "vit-grey": ("ViTForImageClassification", "ViTConfig", {**VIT, "num_channels": 1, "image_size": [16, 16]}),
    "vit-headless": ("ViTModel", "ViTConfig", VIT),
    "clip": ("CLIPModel", "CLIPConfig", CLIP),
    "clip-gelu": (
        "CLIPModel",
        "CLIPConfig",
        {**CLIP, "text_config": {**TEXT, "hidden_act": "gelu", "layer_norm_eps": 1e-3},
         "vision_config": {**IMAGE, "hidden_act": "gelu", "layer_norm_eps": 1e-2}},
    ),
    "clip-old": ("CLIPModel", "CLIPConfig", {**CLIP, "text_config": {**TEXT, "eos_token_id": 2}}),
}  # fmt: skip


def gen(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def theirs(case: str, seed: int = 0) -> Any:
    """A tiny model of theirs, every weight drawn: norms too, so that a swapped one is seen."""
    cls, config, fields = CASES[case]
    torch.manual_seed(seed)
    model = getattr(transformers, cls)(getattr(transformers, config)(**fields)).eval()
    for number, p in enumerate(model.parameters()):
        p.data = torch.randn(p.shape, generator=gen(100 * seed + number)) * 0.2 + (
            p.data if p.dim() < 2 else 0
        )
    return model


def saved(case: str, folder: Path, **options: Any) -> Any:
    model = theirs(case)
    model.save_pretrained(folder, **options)
    return model


def images(model: Any, size: int = 16) -> torch.Tensor:
    config = getattr(model.config, "vision_config", model.config)
    channels = config.channels if hasattr(config, "channels") else config.num_channels
    return torch.randn(3, channels, size, size, generator=gen(1))


# Of each row the first END counts; behind it may stand padding (some tokenizers pad with END itself).
IDS = torch.tensor([[3, 5, 88, 17, END, 7, 7], [3, 60, END, END, END, END, END], [3, 4, 5, 6, 8, 9, END]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()


@torch.no_grad()
def their_outputs(model: Any, size: int = 16) -> list[torch.Tensor]:
    pictures = images(model, size).to(model.dtype)
    if isinstance(model, transformers.CLIPModel):
        out = model(
            input_ids=IDS,
            pixel_values=pictures,
            attention_mask=MASK.long(),
            interpolate_pos_encoding=size != 16,
        )
        return [out.image_embeds, out.text_embeds, out.logits_per_image]
    out = model(pictures, interpolate_pos_encoding=size != 16)
    return [out.logits if "logits" in out else out.last_hidden_state]


@torch.no_grad()
def our_outputs(model: Any, size: int = 16) -> list[torch.Tensor]:
    if isinstance(model, DualEncoder):
        pictures = images(model.image, size)
        return [
            model.embed_images(pictures),
            model.embed_texts(IDS, MASK),
            model.scores(pictures, IDS, MASK),
        ]
    return [model(images(model, size)) if model.config.classes else model.tokens(images(model, size))]


def imported(folder: Path, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pooler.*")
        return import_vision(folder, **options)


def close(found: list[torch.Tensor], want: list[torch.Tensor], atol: float) -> None:
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_theirs_at_any_size_and_after_export(case: str, tmp_path: Path) -> None:
    model = saved(case, tmp_path / "theirs")
    want, stretched = their_outputs(model), their_outputs(model, 24)
    assert want[-1].std() > 0.1 and (want[0] - stretched[0][:, : want[0].shape[1]]).abs().max() > 0.01
    ours = imported(tmp_path / "theirs")
    close(our_outputs(ours), want, 1e-4)
    close(our_outputs(ours, 24), stretched, 1e-4)
    if isinstance(ours, DualEncoder):  # without a mask padding is text, behind the end, where none looks
        torch.testing.assert_close(ours.embed_texts(IDS), want[1], atol=1e-4, rtol=0)

    export_vision(
        ours, tmp_path / "ours", model.config.model_type, source=tmp_path / "theirs", shard_bytes=20_000
    )
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists()
    options = {"add_pooling_layer": False} if case == "vit-headless" else {}
    back, info = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    close(their_outputs(back.eval()), want, 1e-6)
    again = import_vision(tmp_path / "ours")
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.state_dict().values(), ours.state_dict().values(), strict=True)
    )
    close(our_outputs(again), our_outputs(ours), 0)
    assert back.config.architectures == model.config.architectures


@pytest.mark.parametrize("case", ["vit", "clip"])
def test_bf16_differs_from_fp32_no_more_than_theirs_does(case: str, tmp_path: Path) -> None:
    noise = torch.zeros(3, 3)  # of theirs, ours to train and ours to run (rows), in each output (columns)
    for seed in range(
        8
    ):  # one draw of weights says little: the noise of one vector is that of all its scores
        model, folder = theirs(case, seed), tmp_path / str(seed)
        model.save_pretrained(folder)
        exact = their_outputs(model)
        ours = [import_vision(folder, dtype=torch.bfloat16, to_train=train) for train in (True, False)]
        for row, found in enumerate([their_outputs(model.bfloat16()), *map(our_outputs, ours)]):
            for column, (a, b) in enumerate(zip(found, exact, strict=True)):
                assert row == 0 or a.dtype == torch.float32
                noise[row, column] += (a.float() - b).abs().mean()
    noise = noise[:, : len(exact)]
    assert (0.3 * noise[0] < noise[1:]).all() and (noise[1:] < 1.3 * noise[0]).all(), noise
    for to_train, one in zip((True, False), ours, strict=True):
        tower = one.image if isinstance(one, DualEncoder) else one
        assert (tower.blocks[0].mlp.up.weight.dtype == torch.float32) == to_train
        assert tower.norm.weight.dtype == tower.positions.dtype == torch.float32


def test_every_weight_of_an_import_receives_a_gradient(tmp_path: Path) -> None:
    for case in ("vit", "clip"):
        saved(case, tmp_path / case)
        ours = import_vision(tmp_path / case)
        if isinstance(ours, DualEncoder):
            info_nce(*ours(images(ours.image), IDS, MASK)).total.backward()
        else:
            ours(images(ours)).square().sum().backward()
        for name, p in ours.named_parameters():
            assert p.grad is not None and (p.grad.any() or name.endswith("k.bias")), name


def test_shards_and_other_types_are_read(tmp_path: Path) -> None:
    model = saved("clip", tmp_path / "many", max_shard_size="10KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    ours = import_vision(tmp_path / "many")
    close(our_outputs(ours), their_outputs(model), 1e-4)
    export_vision(ours, tmp_path / "low", "clip", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "low" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "low" / "config.json").read_text())["dtype"] == "bfloat16"
    assert type(model).from_pretrained(tmp_path / "low").dtype == torch.bfloat16


def test_a_pooler_is_left_out_with_a_warning_and_a_headless_model_has_no_logits(tmp_path: Path) -> None:
    model = saved("vit-headless", tmp_path / "m")
    with pytest.warns(UserWarning, match=r"2 tensors are left out \('pooler.dense.bias'\)"):
        ours = import_vision(tmp_path / "m")
    assert isinstance(ours, ViT) and ours.params()["head"] == 0
    torch.testing.assert_close(ours.features(images(ours)), their_outputs(model)[0][:, 0], atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="classes is 0"):
        ours(images(ours))


def test_old_files_hold_positions_and_their_end_is_the_largest_id(tmp_path: Path) -> None:
    model = saved("clip-old", tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    weights = load_file(path)
    weights["text_model.embeddings.position_ids"] = torch.arange(10)[None]
    weights["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    save_file(weights, path)
    ours = import_vision(tmp_path / "m")
    assert isinstance(ours, DualEncoder) and ours.text.config.end_id == END
    close(our_outputs(ours), their_outputs(model), 1e-4)
    with pytest.raises(ConfigError, match="row 1 of ids has no real token end_id"):
        ours.embed_texts(torch.tensor([[3, END], [3, 4]]))
    hidden = ours.text.hidden(torch.tensor([[3, 4, 5], [3, 4, 6]]))
    assert (hidden[0, 2] - hidden[1, 2]).abs().max() > 1e-3
    torch.testing.assert_close(hidden[0, :2], hidden[1, :2], atol=1e-6, rtol=1e-5)  # none sees what comes


@pytest.mark.parametrize("scale", [math.log(100.0), 5.5])
def test_a_scale_beyond_the_papers_bound_is_kept(scale: float, tmp_path: Path) -> None:
    model = theirs("clip")
    model.logit_scale.data.fill_(scale)
    model.save_pretrained(tmp_path / "m")
    ours = import_vision(tmp_path / "m")
    assert isinstance(ours, DualEncoder)
    assert ours.largest_scale == pytest.approx(math.exp(scale), rel=1e-6)
    torch.testing.assert_close(our_outputs(ours)[2], their_outputs(model)[2], atol=1e-4, rtol=1e-5)


# --- fields


def test_a_towers_own_dictionary_comes_first_and_what_it_leaves_out_has_its_default() -> None:
    old = {"hidden_size": 99, "num_hidden_layers": 3, "eos_token_id": 2}
    given = {
        "text_config": old,
        "text_config_dict": {"hidden_size": 768, "num_attention_heads": 12},
        "vision_config": {"patch_size": 14},
        "vision_config_dict": None,
    }
    want = transformers.CLIPConfig(**json.loads(json.dumps(given)))
    config = read_vision_config({"model_type": "clip", **given}, "config.json")
    assert (config.text.d_model, config.text.n_layers, config.text.end_id) == (768, 12, 49407)
    assert want.text_config.num_hidden_layers == 12 and want.text_config.eos_token_id == 49407
    assert config.image.patch == want.vision_config.patch_size == 14


# What old programs wrote into every file, and what it means for a network: nothing.
OLD = {
    "add_cross_attention": False, "bos_token_id": 0, "chunk_size_feed_forward": 0, "diversity_penalty": 0.0, "dropout": 0.0,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "initializer_factor": 1.0,
    "length_penalty": 1.0, "max_length": 20, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1,
    "pruned_heads": {}, "repetition_penalty": 1.0, "return_dict": True, "temperature": 1.0, "tie_word_embeddings": True,
    "top_k": 50, "top_p": 1.0, "torchscript": False, "transformers_version": "4.16.0", "attention_dropout": 0.0,
}  # fmt: skip
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
# The fields of published files, with which these models have just so many parameters.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "ViT-B/16": (
        {"model_type": "vit", "architectures": ["ViTForImageClassification"], "attention_probs_dropout_prob": 0.0,
         "encoder_stride": 16, "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "hidden_size": 768, "image_size": 224,
         "intermediate_size": 3072, "layer_norm_eps": 1e-12, "num_attention_heads": 12, "num_channels": 3,
         "num_hidden_layers": 12, "patch_size": 16, "qkv_bias": True, "initializer_range": 0.02,
         "id2label": {str(n): f"class {n}" for n in range(1000)}, "label2id": {"crane": 134}},
        86_567_656,
    ),
    "CLIP ViT-B/32": (
        {"model_type": "clip", "architectures": ["CLIPModel"], "projection_dim": 512, "logit_scale_init_value": 2.6592,
         "initializer_factor": 1.0, "text_config_dict": None, "vision_config_dict": None,
         "text_config": {**OLD, "eos_token_id": 2, "hidden_size": 512, "intermediate_size": 2048, "hidden_act": "quick_gelu",
                         "model_type": "clip_text_model", "projection_dim": 512, "vocab_size": 49408},
         "vision_config": {**OLD, "hidden_size": 768, "patch_size": 32, "model_type": "clip_vision_model"}},
        151_277_313,
    ),
    "CLIP ViT-L/14": (
        {"model_type": "clip", "projection_dim": 768,
         "text_config_dict": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12},
         "vision_config_dict": {**LARGE, "patch_size": 14, "projection_dim": 768}},
        427_616_513,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_and_have_the_published_number_of_parameters(name: str) -> None:
    fields, total = PUBLISHED[name]
    with torch.device("meta"):
        model = VISION_FAMILIES[fields["model_type"]].build(read_vision_config(fields, name), torch.float32)
    assert sum(p.numel() for p in model.parameters()) == model.params()["total"] == total


WRONG: list[tuple[str, str | None, dict[str, Any], str]] = [
    ("vit", None, {"qkv_bias": False}, "field 'qkv_bias' is False"),
    ("vit", None, {"hidden_act": "relu"}, "field 'hidden_act' is 'relu'"),
    ("vit", None, {"num_attention_heads": 5}, "n_heads is 5, which does not divide d_model, 24"),
    ("vit", None, {"num_hidden_layers": 0}, r"n_layers is 0: Input should be greater"),
    ("vit", None, {"patch_size": 5}, "patch is 5"),
    ("vit", None, {"image_size": [16, 32]}, "field 'image_size' is .*a square"),
    ("vit", None, {"architectures": ["ViTForMaskedImageModeling"]}, "field 'architectures' is"),
    ("vit", None, {"architectures": None}, "field 'architectures' is missing"),
    ("vit", None, {"head_dim": 16}, "field 'head_dim' is 16"),
    ("vit", None, {"id2label": {}}, "field 'id2label' is"),
    ("vit", None, {"model_type": "deit"}, "field 'model_type' is 'deit'"),
    ("vit", None, {"model_type": None}, "field 'model_type' is missing"),
    ("clip", None, {"architectures": ["CLIPForImageClassification"]}, "field 'architectures' is"),
    ("clip", None, {"projection_dim": 0}, "field 'projection_dim' is 0"),
    ("clip", "text_config", {"eos_token_id": [89, 2]}, "text_config: field 'eos_token_id' is"),
    ("clip", "text_config", {"eos_token_id": 90}, r"end_id \(90\) must be below vocab_size \(90\)"),
    ("clip", "text_config", {"pruned_heads": {"0": [1]}}, "text_config: field 'pruned_heads' is"),
    ("clip", "vision_config", {"hidden_act": "swish"}, "vision_config: field 'hidden_act' is 'swish'"),
    ("clip", "text_config", {"num_hidden_layers": 0}, "EncoderConfig.n_layers is 0: Input should"),
    ("clip", "vision_config", {"zeal": 1}, "vision_config: field 'zeal' is 1"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "part", "change", "message"), WRONG)
def test_a_field_that_would_change_the_result_is_named(
    case: str, part: str | None, change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(case, tmp_path)
    data = json.loads((tmp_path / "config.json").read_text())
    read_vision_config(data, "config.json")
    (data if part is None else data[part]).update(change)
    with pytest.raises(ConfigError, match=f"(?s)config.json.*({message})"):
        read_vision_config(data, "config.json")
    if change == {"zeal": 1}:
        read_vision_config(data, "config.json", ignore=("zeal",))


# --- tensors


@pytest.mark.parametrize(
    ("case", "name"),
    [
        ("vit", "vit.encoder.layer.1.output.dense.weight"),
        ("vit", "classifier.bias"),
        ("clip", "vision_model.embeddings.patch_embedding.weight"),
        ("clip", "logit_scale"),
    ],
)
def test_what_is_wrong_with_the_files_is_named(case: str, name: str, tmp_path: Path) -> None:
    saved(case, tmp_path / "good")
    weights = load_file(tmp_path / "good" / "model.safetensors")
    for change, message in (
        ({name: None}, rf"tensor '{name}' is missing \(1 in all\)"),
        ({"extra": torch.ones(2)}, r"model.safetensors: tensor 'extra' is not known"),
        ({name: torch.ones(3, 2)}, rf"tensor '{name}' has the shape \[3, 2\]"),
        ({name: torch.ones(weights[name].shape, dtype=torch.int8)}, rf"tensor '{name}' is of type I8"),
    ):
        folder = tmp_path / "bad"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "good", folder)
        save_file(
            {k: v for k, v in {**weights, **change}.items() if v is not None}, folder / "model.safetensors"
        )
        with pytest.raises(CheckpointError, match=message):
            import_vision(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="cannot be read"):
        import_vision(folder)


# --- export


def text(**change: Any) -> Encoder:
    shape = {"vocab_size": 9, "d_model": 16, "n_layers": 1, "n_heads": 2, "mlp_hidden": 16, "max_length": 5}
    return Encoder(EncoderConfig.model_validate({**shape, "causal": True, "end_id": 8, **change}))


def vit(**change: Any) -> ViT:
    return ViT(8, 4, 3, 6, **{"d_model": 12, "n_layers": 1, "n_heads": 2, **change})


def tower(**change: Any) -> ViT:
    return vit(**{"patch_bias": False, "first_norm": True, "head_bias": False, **change})


@pytest.mark.parametrize(
    ("model", "family", "message"),
    [
        (lambda: vit(pooling="mean"), "vit", "its pooling is 'mean'.*'class'"),
        (lambda: vit(mlp="relu2"), "vit", "field 'hidden_act' is 'relu2'"),
        (lambda: vit(first_norm=True), "vit", "its first_norm is True.*False"),
        (lambda: vit(), "clip", "it is a ViT.*a DualEncoder"),
        (lambda: ResNet(3, 5, widths=(4,), depths=(1,)), "vit", "it is a ResNet"),
        (lambda: vit(), "llama", "'model_type' is 'llama'"),
        (lambda: DualEncoder(vit(), text()), "clip", "its image.patch_bias is True"),
        (lambda: DualEncoder(tower(), text(causal=False)), "clip", "its text.causal is False"),
        (lambda: DualEncoder(tower(), text(n_classes=2)), "clip", "its text.n_classes is 2"),
        (lambda: DualEncoder(tower(), text(end_id=None)), "clip", "its text.end_id is None"),
        (lambda: DualEncoder(tower(), text(end_id=2)), "clip", "its text.end_id is 2.*8"),
        (
            lambda: DualEncoder(ResNet(3, 5, widths=(4,), depths=(1,)), text()),
            "clip",
            "the image tower is a ResNet",
        ),
    ],
)
def test_a_model_that_a_family_cannot_express_is_refused(
    model: Any, family: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        export_vision(model(), tmp_path / "out", family)
    assert not list(tmp_path.iterdir())


def test_models_of_our_own_are_theirs_too(tmp_path: Path) -> None:
    own: list[tuple[str, Any, Any]] = [
        ("vit", vit(mlp="gelu_tanh"), transformers.ViTForImageClassification),
        ("clip", DualEncoder(tower(mlp="quick_gelu"), text(mlp="quick_gelu")), transformers.CLIPModel),
    ]
    for family, model, cls in own:
        for number, p in enumerate(model.parameters()):
            p.data = torch.randn(p.shape, generator=gen(number)) * 0.3
        export_vision(model, tmp_path / family, family)
        their = cls.from_pretrained(tmp_path / family).eval()
        pictures = torch.randn(2, 3, 8, 8, generator=gen(1))
        ids = torch.tensor([[1, 4, 8, 0], [3, 3, 5, 8]])
        with torch.no_grad():
            if family == "vit":
                found, want = model(pictures), their(pictures).logits
            else:
                found, want = model.scores(pictures, ids), their(ids, pictures).logits_per_image
        torch.testing.assert_close(found, want, atol=1e-4, rtol=0)
        with pytest.raises(ConfigError, match="is not empty"):
            export_vision(model, tmp_path / family, family)


def test_processors_labels_and_special_ids_are_carried_over(tmp_path: Path) -> None:
    saved("vit", tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").write_bytes(b'{"image_mean": [0.5]}')
    config = json.loads((tmp_path / "vit" / "config.json").read_text())
    config["id2label"] = {str(n): name for n, name in enumerate(["crane", "tench", "crane", "hen", "kite"])}
    config["label2id"] = {name: int(n) for n, name in config["id2label"].items()}  # two classes of one name
    (tmp_path / "vit" / "config.json").write_text(json.dumps(config))
    ours = import_vision(tmp_path / "vit")
    export_vision(ours, tmp_path / "out", "vit", source=tmp_path / "vit")
    assert (tmp_path / "out" / "preprocessor_config.json").read_bytes() == b'{"image_mean": [0.5]}'
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["id2label"] == config["id2label"] and written["label2id"] == config["label2id"]
    export_vision(vit(), tmp_path / "six", "vit", source=tmp_path / "vit")
    assert len(json.loads((tmp_path / "six" / "config.json").read_text())["id2label"]) == 6

    saved("clip", tmp_path / "clip")
    (tmp_path / "clip" / "tokenizer.json").write_bytes(b"{}")
    export_vision(import_vision(tmp_path / "clip"), tmp_path / "both", "clip", source=tmp_path / "clip")
    assert (tmp_path / "both" / "tokenizer.json").read_bytes() == b"{}"
    part = json.loads((tmp_path / "both" / "config.json").read_text())["text_config"]
    assert (part["bos_token_id"], part["eos_token_id"], part["pad_token_id"]) == (3, END, 7)


def test_every_family_is_tested() -> None:
    assert {theirs(case).config.model_type for case in CASES} == set(VISION_FAMILIES)
