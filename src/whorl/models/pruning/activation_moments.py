"""What a model's layers see: the second moments of each `Linear`'s inputs over some text.

    H = sum over positions of x x^T          [in, in], for each layer

One statistic tells three things of a layer y = W x without its ever being run again: how much an error E in the weights
costs in the output, sum |E x|^2 = tr(E H E^T) (rounding: `models/quantization/gptq.py`); what an input, or a group of them,
contributes, tr(W_j H_jj W_j^T); and the least-squares weights of what is left when some go (pruning: `prune.py`).

The subtle part: sums over many positions of numbers of very different size. They are taken in fp32 products of a batch and
added up in fp64; nothing here is divided by the number of positions, since no use above depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from whorl.errors import ConfigError
from whorl.models.language_model import LanguageModel
from whorl.nn.linear import Linear


class _StopForward(Exception):
    """The block that was asked for is done."""


@torch.no_grad()
def second_moments(
    model: LanguageModel,
    rows: Iterable[Tensor],
    names: Collection[str],
    stop_after: nn.Module | None = None,
) -> dict[str, Tensor]:
    """H of the inputs of each `Linear` in `names`, over `rows`.

    Args:
        rows: batches of ids [B, T], each row one document or a piece of one.
        until: a block after which a forward may stop.

    Returns:
        name -> [in, in] fp64, symmetric.

    Raises:
        ConfigError: no rows; a name that is no `Linear` of the model; a layer that was never called.
    """
    found: dict[str, Tensor] = {}
    hooks = []

    def watch(name: str) -> Callable[..., None]:
        def see(_module: nn.Module, given: tuple[Any, ...]) -> None:
            x = given[0].reshape(-1, given[0].shape[-1]).float()
            part = (x.t() @ x).double()
            found[name] = found[name] + part if name in found else part

        return see

    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, Linear):
            raise ConfigError(f"{name} is a {type(module).__name__}", expected="a Linear of the model")
        hooks.append(module.register_forward_pre_hook(watch(name)))
    if stop_after is not None:

        def stop(*_: Any) -> None:
            raise _StopForward

        hooks.append(stop_after.register_forward_hook(stop))
    seen = 0
    try:
        for ids in rows:
            seen += ids.numel()
            try:
                model(ids.to(model.embedding.device))
            except _StopForward:
                continue
    finally:
        for hook in hooks:
            hook.remove()
    if not seen:
        raise ConfigError("there is no text to calibrate with", expected="at least one row of ids")
    if missing := [name for name in names if name not in found]:
        raise ConfigError(f"{missing[0]} was never called", expected="a layer that takes part in a forward")
    return found
