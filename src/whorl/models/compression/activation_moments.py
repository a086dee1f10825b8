"""Second moments of the inputs of `Linear` layers over a calibration text.

    H = sum over positions of x x^T          [in, in], for each layer

For a layer y = W x, H gives without running the layer again:

- the output error of a weight error E, sum |E x|^2 = tr(E H E^T), for rounding (`models/compression/gptq.py`);
- the contribution of a group of inputs, tr(W_j H_jj W_j^T);
- the least-squares weights after removing inputs, for pruning (`prune.py`).

Sums over many positions mix numbers of very different size: each batch's product is fp32, their sum fp64. H is not divided
by the number of positions, since no use above depends on it.
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
    """Stops a forward after the requested block."""


@torch.no_grad()
def second_moments(
    model: LanguageModel,
    rows: Iterable[Tensor],
    names: Collection[str],
    stop_after: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Compute H of the inputs of each `Linear` in `names` over `rows`.

    Args:
        rows: batches of ids [B, T], each row one document or a part of one.
        stop_after: a block after which a forward may stop.

    Returns:
        name -> [in, in] fp64, symmetric.

    Raises:
        ConfigError: no rows; a name that is no `Linear` of the model; a layer that was never called.
    """
    moments: dict[str, Tensor] = {}
    hooks = []

    def add_moments(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            product = (x.t() @ x).double()
            moments[name] = moments[name] + product if name in moments else product

        return hook

    for name in names:
        module = model.get_submodule(name)
        if not isinstance(module, Linear):
            raise ConfigError(f"{name} is a {type(module).__name__}", expected="a Linear of the model")
        hooks.append(module.register_forward_pre_hook(add_moments(name)))
    if stop_after is not None:

        def stop(*_: Any) -> None:
            raise _StopForward

        hooks.append(stop_after.register_forward_hook(stop))
    n_ids = 0
    try:
        for ids in rows:
            n_ids += ids.numel()
            try:
                model(ids.to(model.embedding.device))
            except _StopForward:
                continue
    finally:
        for handle in hooks:
            handle.remove()
    if not n_ids:
        raise ConfigError("no calibration text", expected="at least one row of ids")
    if missing := [name for name in names if name not in moments]:
        raise ConfigError(f"{missing[0]} was never called", expected="a layer that the forward uses")
    return moments
