"""Students: smaller models for a teacher to teach, made by width, by depth, or by pruning.

    width       the same shape with fewer heads and channels, drawn anew; it knows nothing yet
    layers      of the teacher's own, evenly: layer round(i (n - 1) / (k - 1)) becomes layer i of k, so that the first and
                the last stay (DistilBERT takes every other one, Sanh et al. 2019, arXiv:1910.01108, section 3)
    pruning     whole heads and channels go, the rest makes good (`models/pruning/prune.py`); after `layers`, if both are asked for

Embedding and head come along with layers and pruning, and so does most of what was known: such a student begins near its
teacher, a narrow one begins nowhere. In exchange a narrow one is smaller in every product, the head's too.

The subtle part is that layers differ. In a `Transformer` each has a mixer by name and may be a mixture of experts, so what
is copied is not numbers alone: the pattern of names is that of the layers that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from whorl.align.config import StudentConfig
from whorl.errors import ConfigError
from whorl.models import LanguageModel, make_model
from whorl.models.decoder import DecoderConfig
from whorl.models.pruning.prune import prune
from whorl.models.serialization import ModelConfig
from whorl.models.transformer_config import AttentionConfig, TransformerConfig


def make_student(
    teacher: LanguageModel,
    config: StudentConfig,
    *,
    generator: torch.Generator | None = None,
    calibration_ids: Sequence[Tensor] = (),
) -> LanguageModel:
    """A student of `teacher`, on its device; the teacher stays as it is.

    Args:
        generator: draws the weights of a narrow one.
        rows: batches of ids [B, T] to prune by.

    Raises:
        ConfigError: more layers than there are, a shape that cannot be scaled or cut, nothing to prune by.
    """
    if config.width_multiplier is not None:
        shape = scale_width(teacher.config, config.width_multiplier)
        if config.n_layers is not None:
            shape = select_layers_config(shape, uniform_layers(shape.n_layers, config.n_layers))
        return make_model(shape, generator, teacher.dtype).to(teacher.embedding.device)
    student = teacher if config.n_layers is None else select_layers(teacher, config.n_layers)
    fewer = {"heads": config.n_heads, "kv_heads": config.n_kv_heads, "mlp_hidden": config.mlp_hidden}
    if any(fewer.values()):
        if not calibration_ids:
            raise ConfigError(
                "a student is to be pruned, and there are no rows of ids to measure with",
                expected="some of the texts that it will learn from",
            )
        calibration_ids = [ids.to(teacher.embedding.device) for ids in calibration_ids]
        student = prune(student, calibration_ids, **fewer)  # type: ignore[arg-type]
    if student is teacher:
        raise ConfigError("the student is its teacher", expected="width, layers, heads or mlp_hidden")
    return student


def uniform_layers(n: int, k: int) -> list[int]:
    """k of n layers, the first and the last among them.

    Raises:
        ConfigError: there are not as many.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"layers is {k}", expected=f"1 to {n}, the teacher's")
    return [0] if k == 1 else [round(i * (n - 1) / (k - 1)) for i in range(k)]


def select_layers(teacher: LanguageModel, layers: int) -> LanguageModel:
    """A model of `layers` of the teacher's own."""
    if teacher.quantization is not None:
        raise ConfigError("the teacher is quantised", expected="one in full precision to take layers from")
    chosen = uniform_layers(len(teacher.blocks), layers)
    student = make_model(select_layers_config(teacher.config, chosen), None, teacher.dtype)
    student.to(teacher.embedding.device)
    new = {old: number for number, old in enumerate(chosen)}
    state: dict[str, Tensor] = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            if int(parts[1]) not in new:
                continue
            parts[1] = str(new[int(parts[1])])
        state[".".join(parts)] = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    student.load_state_dict(state)  # copies
    return student.train(teacher.training)


def select_layers_config(config: ModelConfig, chosen: Sequence[int]) -> ModelConfig:
    """The shape of those layers alone."""
    changes: dict[str, Any] = {"n_layers": len(chosen)}
    if isinstance(config, TransformerConfig):
        if config.kv_sharing_factor > 1:
            raise ConfigError(
                f"layers lend keys to others (share_keys is {config.kv_sharing_factor})",
                expected="a teacher whose layers can go one by one", do="choose a width",
            )  # fmt: skip
        names = config.layer_names()
        pattern = tuple(names[n] for n in chosen)
        changes |= {"pattern": pattern, "mixers": {n: m for n, m in config.mixers.items() if n in pattern}}
        if config.experts is not None:
            dense = tuple(i for i, n in enumerate(chosen) if not config.has_experts(n))
            changes["experts"] = config.experts.model_copy(update={"dense_layers": dense})
    return _revalidated(config, changes)


def scale_width(config: ModelConfig, multiplier: float) -> ModelConfig:
    """The same shape at a share of its width: residual stream, heads and channels; heads stay as wide as they are.

    Raises:
        ConfigError: layers that nobody knows how to scale.
    """

    def heads(n: int, kv: int) -> dict[str, int]:
        fewer, groups = max(1, round(n * multiplier)), max(1, round(kv * multiplier))
        return {"n_heads": fewer, "n_kv_heads": max(g for g in range(1, groups + 1) if fewer % g == 0)}

    def even(n: int) -> int:
        return max(8, round(n * multiplier / 8) * 8)

    changes: dict[str, Any] = {"d_model": even(config.d_model), "mlp_hidden": even(config.mlp_hidden)}
    if isinstance(config, DecoderConfig):
        return _revalidated(config, changes | heads(config.n_heads, config.n_kv_heads))
    mixers: dict[str, Any] = {}
    for name, mixer in config.mixers.items():
        if not isinstance(mixer, AttentionConfig):
            raise ConfigError(
                f"mixers: nobody knows how to make {name!r} ({mixer.kind}) narrower",
                expected="attention with heads", do="give the student a configuration of its own",
            )  # fmt: skip
        mixers[name] = mixer.model_copy(update=heads(mixer.n_heads, mixer.n_kv_heads))
    if config.experts is not None:
        e = config.experts
        shared = even(e.shared_hidden) if e.shared_hidden else 0
        changes["experts"] = e.model_copy(update={"hidden": even(e.hidden), "shared_hidden": shared})
    return _revalidated(config, changes | {"mixers": mixers})


def _revalidated(config: ModelConfig, changes: dict[str, Any]) -> ModelConfig:
    """Checked again as a whole."""
    return type(config).model_validate(config.model_copy(update=changes).model_dump())
