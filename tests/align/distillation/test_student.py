"""Student models of every kind, and that each one learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.support.align.distillation import learn, mean_divergence, model_of, some_texts
from tests.support.tiny import decoder_config, transformer_config

from whorl.align.config import StudentConfig
from whorl.align.distillation.student import make_student, select_layers, uniform_layers
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import ConfigError
from whorl.models import LanguageModel, TransformerConfig, make_model
from whorl.models.compression.shapes import scale_width
from whorl.models.transformer_config import AttentionConfig, MLAConfig, MoEConfig
from whorl.tracking.seeds import generator


def mixed(**options: Any) -> TransformerConfig:
    head = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 8}
    mixers = {"local": AttentionConfig(**head, window=4), "global": AttentionConfig(**head)}
    usual = {"n_layers": 6, "mixers": mixers, "pattern": ("local", "local", "global")}
    return transformer_config(**{**usual, **options})


def block_size(model: LanguageModel) -> int:
    return sum(p.numel() for p in model.blocks.parameters())


def test_uniform_layers_are_distinct_and_keep_ends() -> None:
    assert (uniform_layers(8, 1), uniform_layers(9, 3), uniform_layers(4, 3)) == ([0], [0, 4, 8], [0, 2, 3])
    for n in range(2, 40):
        for k in range(2, n + 1):
            found = uniform_layers(n, k)
            assert found == sorted(set(found)) and (found[0], found[-1], len(found)) == (0, n - 1, k)
    with pytest.raises(ConfigError, match="n_layers is 9"):
        uniform_layers(8, 9)


def test_select_layers_copies_teacher_layers() -> None:
    teacher = model_of(0, layers=5)
    student = make_student(teacher, StudentConfig(n_layers=3))
    state = student.state_dict()
    for new, old in enumerate([0, 2, 4]):
        for name, p in teacher.blocks[old].state_dict().items():
            assert torch.equal(state[f"blocks.{new}.{name}"], p)
    assert torch.equal(student.embedding, teacher.embedding) and student.embedding is not teacher.embedding
    whole = make_student(teacher, StudentConfig(n_layers=5))
    ids = torch.arange(12)[None] + 97
    assert torch.equal(whole(ids), teacher(ids))


def test_select_layers_keeps_mixer_names() -> None:
    config = mixed(experts=MoEConfig(n_experts=3, top_k=2, hidden=16, dense_layers=(0, 5)))
    teacher = make_model(config, generator(0, "test"))
    student = select_layers(teacher, 3)  # layers 0, 2, 5: 2.5 rounds to 2
    assert student.config.layer_names() == ["local", "global", "global"]
    assert student.config.experts.dense_layers == (0, 2)
    new, old = student.state_dict(), teacher.state_dict()
    assert torch.equal(new["blocks.1.mixer.q.weight"], old["blocks.2.mixer.q.weight"])
    only = select_layers(make_model(mixed(), generator(0, "test")), 1)
    assert set(only.config.mixers) == {"local"}


def test_select_layers_rejects_shared_kv() -> None:
    head = AttentionConfig(n_heads=2, n_kv_heads=2, head_dim=8)
    config = mixed(kv_sharing_factor=2, mixers={"a": head}, pattern=("a",))
    with pytest.raises(ConfigError, match="share keys"):
        select_layers(make_model(config, generator(0, "test")), 2)


def test_scale_width_half_is_quarter_size() -> None:
    config = decoder_config(d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=32, mlp_hidden=384)
    half = scale_width(config, 0.5)
    (heads,) = half.mixers.values()
    assert isinstance(heads, AttentionConfig)
    assert (half.d_model, half.mlp_hidden, heads.n_heads, heads.n_kv_heads) == (64, 192, 2, 1)
    small, large = (block_size(make_model(c, generator(0))) for c in (half, config))
    assert small / large == pytest.approx(0.25, abs=0.01)
    thin = scale_width(mixed(), 0.5)
    want = AttentionConfig(n_heads=2, n_kv_heads=1, head_dim=8, window=4)
    assert thin.d_model == 16 and thin.mixers["local"] == want
    latent = MLAConfig(n_heads=2, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8)
    with pytest.raises(ConfigError, match=r"'x' .latent."):
        scale_width(mixed(mixers={"x": latent}, pattern=()), 0.5)


def test_narrow_student_is_drawn_by_generator() -> None:
    teacher, shape = model_of(0, width=32, layers=2), StudentConfig(width_multiplier=0.5, n_layers=1)
    a, b = (make_student(teacher, shape, generator=generator(1)) for _ in range(2))
    assert torch.equal(a.embedding, b.embedding) and len(a.blocks) == 1 and a.config.d_model == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"width_multiplier": 0.5}, {"n_layers": 2}, {"n_heads": 1, "mlp_hidden": 32},
        {"n_layers": 2, "mlp_hidden": 24},
    ],
)  # fmt: skip
def test_every_kind_of_student_learns(changes: dict[str, Any]) -> None:
    teacher, texts, shape = model_of(0, width=32, layers=3), some_texts(16), StudentConfig(**changes)
    rows = [torch.from_numpy(text.ids)[None, :-1] for text in texts]
    made = make_student(teacher, shape, generator=generator(1, "student"), calibration_ids=rows)
    assert block_size(made) < block_size(teacher)
    before = mean_divergence(made, teacher, texts, "forward")
    learn(PolicyModel(made), teacher, texts, epochs=12.0)
    assert mean_divergence(made, teacher, texts, "forward") < 0.7 * before
    assert not any(p.requires_grad for p in teacher.parameters())


def test_make_student_rejects_invalid_arguments() -> None:
    teacher = model_of(0, layers=2)
    with pytest.raises(ConfigError, match="equals its teacher"):
        make_student(teacher, StudentConfig())
    with pytest.raises(ConfigError, match="calibration ids"):
        make_student(teacher, StudentConfig(n_heads=1))
    with pytest.raises(ValidationError, match="nothing to prune"):
        StudentConfig(width_multiplier=0.5, n_heads=1)
