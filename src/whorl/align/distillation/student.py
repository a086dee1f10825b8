"""Student models for distillation: reduced width, a subset of the teacher's layers, or pruning.

    width_multiplier   the same shape with fewer heads and channels, randomly initialized
    n_layers           evenly spaced layers of the teacher: layer round(i (n - 1) / (k - 1)) becomes layer i of k, so
                       the first and the last stay (DistilBERT takes every second layer, Sanh et al. 2019,
                       arXiv:1910.01108, section 3)
    pruning            removes heads and channels and compensates (`models/compression/prune.py`); after n_layers

Layer selection and pruning keep embedding, head and most of the knowledge, so the student starts near its teacher. A
narrow student starts from scratch, but is smaller in every matrix product, including the head.

The subtle point: layers differ. In a `Transformer` each layer names its mixer and may be a mixture of experts. So the
copy also takes over the pattern of names.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whorl.align.config import StudentConfig
from whorl.errors import ConfigError
from whorl.models import LanguageModel, make_model
from whorl.models.compression.prune import prune
from whorl.models.compression.shapes import scale_width, select_layers_config


def make_student(
    teacher: LanguageModel,
    config: StudentConfig,
    *,
    generator: torch.Generator | None = None,
    calibration_ids: Sequence[Tensor] = (),
) -> LanguageModel:
    """Return a student of `teacher` on its device; the teacher is unchanged.

    Args:
        generator: initializes the weights of a narrow student.
        calibration_ids: batches of ids [B, T] for pruning.

    Raises:
        ConfigError: more layers than the teacher has, a shape that cannot be scaled or pruned, or no calibration ids.
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
                "pruning needs calibration ids, and there are none",
                expected="some of the training texts",
            )
        calibration_ids = [ids.to(teacher.embedding.device) for ids in calibration_ids]
        student = prune(student, calibration_ids, **fewer)  # type: ignore[arg-type]
    if student is teacher:
        raise ConfigError(
            "the student equals its teacher", expected="width_multiplier, n_layers, n_heads or mlp_hidden"
        )
    return student


def uniform_layers(n: int, k: int) -> list[int]:
    """Return k of n layer indices, including the first and the last.

    Raises:
        ConfigError: k is not within 1 to n.
    """
    if not 1 <= k <= n:
        raise ConfigError(f"n_layers is {k}", expected=f"1 to {n}, the layers of the teacher")
    return [0] if k == 1 else [round(i * (n - 1) / (k - 1)) for i in range(k)]


def select_layers(teacher: LanguageModel, layers: int) -> LanguageModel:
    """Return a model with `layers` of the teacher's layers."""
    if teacher.quantization is not None:
        raise ConfigError("the teacher is quantized", expected="a teacher in full precision")
    chosen = uniform_layers(len(teacher.blocks), layers)
    student = make_model(select_layers_config(teacher.config, chosen), None, teacher.dtype)
    student.to(teacher.embedding.device)
    new_index = {old: number for number, old in enumerate(chosen)}
    state: dict[str, Tensor] = {}
    for name, tensor in teacher.state_dict().items():
        parts = name.split(".")
        if parts[0] == "blocks":
            if int(parts[1]) not in new_index:
                continue
            parts[1] = str(new_index[int(parts[1])])
        state[".".join(parts)] = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
    student.load_state_dict(state)  # copies
    return student.train(teacher.training)
