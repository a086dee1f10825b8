"""A trained model in few bits: rounding to the nearest, or so that the layers' outputs suffer least.

Rounding to the nearest makes the smallest error in the weights. What matters is the error in what a layer gives,

    sum over x of |(W - Q) x|^2 = tr((W - Q) H (W - Q)^T),        H = sum x x^T over some text         (`models/pruning/activation_moments.py`)

and where inputs are correlated one rounding can make good for another. GPTQ (Frantar et al. 2022, arXiv:2210.17323; Optimal
Brain Quantization, arXiv:2208.11580, eq. 2, with one order for all rows): columns are rounded one after another, and the
error of each is spread at once over those that are still free, as the least squares say:

    q_j = round(w_j);    w_F -= (w_j - q_j) / [inv(H_F)]_jj * [inv(H_F)]_jF        F: the columns from j on

The rows of the inverses of all these H_F are the rows of one upper Cholesky factor U of inv(H) = U^T U (section 3.3 there):
[inv(H_F)]_jF = U_jj U_jF. So one factorisation serves all columns of all rows, and updates of far columns are put off and
made as one product a block. A test holds this to the definition, with each inverse taken anew.

Here the columns go by falling H_jj: those that carry most are rounded while most others are free to make good. So scales
cannot wait for the updated weights of their group; they are chosen before, each group's as the largest number times one of a
few factors, so that sum_j H_jj (w_j - q_j)^2 is least: cutting one number off may be worth finer steps for all others.

The subtle part: H of a later layer must be that of the inputs it will see, with all before it rounded already. So blocks are
treated in order, and the text is read once more for each. A little is added to the diagonal (`DAMPING`), for inputs that the
text never used have no H of their own.

Shapes: W [out, in], H [in, in] fp64, scales [out, groups], codes [out, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.models.language_model import LanguageModel
from whorl.models.pruning.activation_moments import second_moments
from whorl.models.quantization.weights import (
    QuantizationConfig,
    head_as_linear,
    quantizable_layers,
    replace_module,
    set_head_layer,
)
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

DAMPING = 0.01  # of the mean of H's diagonal
BLOCK = 128  # columns whose updates of later ones are put off
SCALE_FACTORS = tuple(1 - 0.05 * n for n in range(9))  # of the scale with which nothing is cut off


def quantize_model(
    model: LanguageModel,
    scheme: QuantizationConfig,
    calibration_batches: Sequence[Tensor] = (),
    on_layers_done: Callable[[int], None] = lambda _: None,
) -> LanguageModel:
    """Puts the matrices of `model` into few bits, in place; it can be run then, not trained.

    Args:
        rows: batches of ids [B, T] to calibrate with, if scheme.rounding is "calibrated".
        advance: told the number of layers that are done, for a progress bar.

    Returns:
        `model`, with `scheme` set.

    Raises:
        ConfigError: it is quantised already; a group that does not divide a matrix; no text; a weight that is not finite.
    """
    if model.quantization is not None:
        raise ConfigError(
            f"the model is quantised already: {model.quantization}", expected="one in full precision"
        )
    names = quantizable_layers(model)
    for name in names:  # before any work
        weight = cast(Linear, model.get_submodule(name)).weight
        check_group(weight.shape[1], scheme.group_size, scheme.format, f"{name}.weight")
        if not weight.isfinite().all():
            raise ConfigError(f"{name}.weight holds numbers that are not finite", expected="a trained model")
    calibrated = scheme.rounding == "calibrated"
    if calibrated and scheme.format == "fp8":
        raise ConfigError("rounding 'calibrated' with fp8", expected="int8 or int4, whose codes lie evenly")
    if calibrated and not calibration_batches:
        raise ConfigError(
            "rounding 'calibrated', and no text is given", expected="rows of ids to calibrate with"
        )
    for number, block in enumerate(model.blocks):
        mine = [name for name in names if name.startswith(f"blocks.{number}.")]
        moments = (
            second_moments(model, calibration_batches, mine, stop_after=block) if calibrated and mine else {}
        )
        for name in mine:
            layer = cast(Linear, model.get_submodule(name))
            scales = codes = None
            if calibrated:
                scales = best_scales(layer.weight, moments[name].diagonal(), scheme.format, scheme.group_size)
                codes = gptq(layer.weight, moments[name], scales, scheme.format)
            quantised = QuantizedLinear.from_linear(
                layer, scheme.format, scheme.group_size, dynamic=scheme.dynamic, codes=codes, scales=scales
            )
            replace_module(model, name, quantised)
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
    """Scales [out, groups] under which rounding to the nearest costs least; importance: [in], H's diagonal."""
    widest = compute_scales(weight, weight_format, group_size)
    weight, best = weight.detach().float(), widest
    least = torch.full_like(widest, float("inf"))
    share = importance.float().view(1, widest.shape[1], -1)
    for factor in SCALE_FACTORS:
        scales = widest * factor
        back = (
            split_groups(encode(weight, scales, weight_format).float(), scales.shape[1]) * scales[:, :, None]
        )
        cost = ((split_groups(weight, scales.shape[1]) - back).square() * share).sum(2)
        best, least = torch.where(cost < least, scales, best), torch.minimum(cost, least)
    return best


@torch.no_grad()
def gptq(
    weight: Tensor, hessian: Tensor, scales: Tensor, weight_format: WeightFormat, damping: float = DAMPING
) -> Tensor:
    """Codes [out, in] int8 by GPTQ (see the top of this file).

    weight: [out, in]; moments: [in, in] fp64; scales: [out, groups]; damping: share of the mean of the diagonal.
    """
    low, high = CODE_MIN[weight_format], CODE_MAX[weight_format]
    order = hessian.diagonal().argsort(descending=True, stable=True)
    h = hessian[order][:, order].clone()
    h.diagonal().add_(damping * h.diagonal().mean().clamp(min=1e-12))
    # inv(H) = U^T U, U upper: from H's own Cholesky factor, of which a well-made inverse follows
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
    back = torch.empty_like(codes)
    back[:, order] = codes
    return back.to(torch.int8)
