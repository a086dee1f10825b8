"""Weight quantization: round to nearest, or GPTQ, which minimizes the error of the layers' outputs.

Rounding to nearest minimizes the weight error. The error that matters is that of the output,

    sum over x of |(W - Q) x|^2 = tr((W - Q) H (W - Q)^T),        H = sum x x^T  (`models/compression/activation_moments.py`)

With correlated inputs one rounding error can compensate another. GPTQ (Frantar et al. 2022, arXiv:2210.17323) rounds
columns one by one. It spreads the error of each over the columns F that are not rounded yet, by least squares (Optimal
Brain Quantization, arXiv:2208.11580, eq. 2, with one order for all rows):

    q_j = round(w_j);    w_F -= (w_j - q_j) / [inv(H_F)]_jj * [inv(H_F)]_jF        F: the columns from j on

One upper Cholesky factor U of inv(H) = U^T U gives all rows needed: [inv(H_F)]_jF = U_jj U_jF (section 3.3). Updates of
columns beyond the current block are applied as one product per block. A test compares this with the definition.

Columns are rounded by falling H_jj. The scales of a group must then be fixed before its weights are updated: each is the
largest magnitude times a factor of `SCALE_FACTORS`, chosen to minimize sum_j H_jj (w_j - q_j)^2. Clipping one weight may
pay for finer steps of all others.

Subtle point: H of a later layer must be that of its inputs after all earlier layers are quantized. Blocks are therefore
processed in order, with one pass over the text for each. `DAMPING` is added to the diagonal for inputs that are always 0.

Shapes: W [out, in], H [in, in] fp64, scales [out, groups], codes [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.models.compression.activation_moments import second_moments
from whorl.models.compression.quantize import (
    QuantizationConfig,
    head_as_linear,
    quantizable_layers,
    replace_module,
    set_head_layer,
)
from whorl.models.language_model import LanguageModel
from whorl.nn.linear import Linear
from whorl.nn.ngram import NGramEmbedding
from whorl.nn.quantized_linear import (
    CODE_MAX,
    CODE_MIN,
    QuantizedLinear,
    QuantizedNGramEmbedding,
    WeightFormat,
    check_group,
    compute_scales,
    encode,
    split_groups,
)

DAMPING = 0.01  # relative to the mean of H's diagonal
BLOCK = 128  # columns per block; updates of later blocks are deferred
SCALE_FACTORS = tuple(1 - 0.05 * n for n in range(9))  # of the scale that clips nothing


def quantize_model(
    model: LanguageModel,
    scheme: QuantizationConfig,
    calibration_batches: Sequence[Tensor] = (),
    on_layers_done: Callable[[int], None] = lambda _: None,
) -> LanguageModel:
    """Quantize the matrices of `model` in place; afterwards it supports inference only.

    Args:
        scheme: format, group size and rounding.
        calibration_batches: batches of ids [B, T], for scheme.rounding "calibrated".
        on_layers_done: called with the number of finished layers, for a progress bar.

    Returns:
        `model`, with `quantization` set to `scheme`.

    Raises:
        ConfigError: already quantized; a group size that does not divide a matrix; no text; a weight that is not finite.
    """
    if model.quantization is not None:
        raise ConfigError(
            f"the model is already quantized: {model.quantization}", expected="a model in full precision"
        )
    names = quantizable_layers(model)
    for name in names:  # check before any work
        weight = cast(Linear, model.get_submodule(name)).weight
        check_group(weight.shape[1], scheme.group_size, scheme.format, f"{name}.weight")
        if not weight.isfinite().all():
            raise ConfigError(f"{name}.weight is not finite", expected="finite weights")
    calibrated = scheme.rounding == "calibrated"
    if calibrated and scheme.format == "fp8":
        raise ConfigError(
            "rounding 'calibrated' with fp8", expected="int8 or int4, which have evenly spaced codes"
        )
    if calibrated and not calibration_batches:
        raise ConfigError("rounding 'calibrated' without a text", expected="batches of calibration ids")
    for number, block in enumerate(model.blocks):
        layer_names = [name for name in names if name.startswith(f"blocks.{number}.")]
        moments = (
            second_moments(model, calibration_batches, layer_names, stop_after=block)
            if calibrated and layer_names
            else {}
        )
        for name in layer_names:
            layer = cast(Linear, model.get_submodule(name))
            scales = codes = None
            if calibrated:
                scales = best_scales(layer.weight, moments[name].diagonal(), scheme.format, scheme.group_size)
                codes = gptq(layer.weight, moments[name], scales, scheme.format)
            quantized = QuantizedLinear.from_linear(
                layer, scheme.format, scheme.group_size, dynamic=scheme.dynamic, codes=codes, scales=scales
            )
            replace_module(model, name, quantized)
            on_layers_done(1)
    if scheme.head:
        set_head_layer(model, QuantizedLinear.from_linear(head_as_linear(model), "int8"))
    memory = getattr(model, "memory", None)
    if scheme.ngram and isinstance(memory, NGramEmbedding):
        model.memory = QuantizedNGramEmbedding.from_embedding(memory)
    model.quantization = scheme
    return model.requires_grad_(False).eval()


def best_scales(
    weight: Tensor, importance: Tensor, weight_format: WeightFormat, group_size: int | None = None
) -> Tensor:
    """Return the scales [out, groups] with the smallest rounding cost; importance: [in], the diagonal of H."""
    widest = compute_scales(weight, weight_format, group_size)
    weight, best = weight.detach().float(), widest
    lowest = torch.full_like(widest, float("inf"))
    importance = importance.float().view(1, widest.shape[1], -1)
    for factor in SCALE_FACTORS:
        scales = widest * factor
        dequantized = (
            split_groups(encode(weight, scales, weight_format).float(), scales.shape[1]) * scales[:, :, None]
        )
        cost = ((split_groups(weight, scales.shape[1]) - dequantized).square() * importance).sum(2)
        best, lowest = torch.where(cost < lowest, scales, best), torch.minimum(cost, lowest)
    return best


@torch.no_grad()
def gptq(
    weight: Tensor, hessian: Tensor, scales: Tensor, weight_format: WeightFormat, damping: float = DAMPING
) -> Tensor:
    """Return codes [out, in] int8 by GPTQ (see the top of this file).

    weight: [out, in]; hessian: [in, in] fp64; scales: [out, groups]; damping: relative to the mean of the diagonal.
    """
    low, high = CODE_MIN[weight_format], CODE_MAX[weight_format]
    order = hessian.diagonal().argsort(descending=True, stable=True)
    h = hessian[order][:, order].clone()
    h.diagonal().add_(damping * h.diagonal().mean().clamp(min=1e-12))
    # inv(H) = U^T U with U upper, from H's own Cholesky factor: a well-conditioned inverse
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    w = weight.detach().float()[:, order].clone()
    scale = scales.repeat_interleave(weight.shape[1] // scales.shape[1], dim=1)[:, order]
    codes = torch.empty_like(w)
    d_in = w.shape[1]
    for start in range(0, d_in, BLOCK):
        stop = min(start + BLOCK, d_in)
        errors = torch.empty(w.shape[0], stop - start, device=w.device)
        for j in range(start, stop):
            code = (w[:, j] / scale[:, j]).round_().clamp_(low, high)
            error = (w[:, j] - code * scale[:, j]) / upper[j, j]
            w[:, j + 1 : stop].addr_(error, upper[j, j + 1 : stop], alpha=-1)
            codes[:, j], errors[:, j - start] = code, error
        w[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    reordered = torch.empty_like(codes)
    reordered[:, order] = codes
    return reordered.to(torch.int8)
