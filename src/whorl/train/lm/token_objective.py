"""Objectives of users in place of next-token prediction, as "module:attribute" in the setting `objective`.

    def objective(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss

logits: [B, T, vocab] fp32 of a micro-batch, with gradient. targets: [B, T] ids. mask: [B, T], True where there is a target.
The total is a sum over the targets in the mask and the count is their number, so the split of a step changes nothing.
Weights of tokens or rows belong into the total.

The fused loss never holds all logits and cannot call such a function, so it is not used, and nothing is compiled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from whorl.errors import ConfigError
from whorl.objectives.next_token import Loss, next_token_of_logits
from whorl.train.config import TOKEN_OBJECTIVES

FORM = "a function (logits, targets, mask) -> whorl.objectives.next_token.Loss"


def own_objective(name: str) -> Callable[[Tensor, Tensor, Tensor], Loss] | None:
    """Return the function that a setting `objective` names, checked at each call; None for next-token prediction.

    Raises:
        ConfigError: as `checked_function`; from the function: as `checked_loss`.
    """
    if name == "next_token":
        return None
    function = checked_function("objective", name, TOKEN_OBJECTIVES.get(name), 3, FORM)

    def objective(logits: Tensor, targets: Tensor, mask: Tensor) -> Loss:
        with torch.no_grad():
            usual = next_token_of_logits(logits, targets, mask)
        return checked_loss(f"objective {name!r}", function(logits, targets, mask), usual, "mask.sum()")

    return objective


def checked_function(kind: str, name: str, found: Any, arguments: int, form: str) -> Callable[..., Any]:
    """Return `found`, which `name` names, or raise ConfigError where it cannot be called with so many arguments."""
    try:
        inspect.signature(found).bind(*[None] * arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be called: {error}", expected=form) from error
    return found  # type: ignore[no-any-return]


def checked_loss(what: str, loss: Any, usual: Loss, count: str) -> Loss:
    """Return the loss of a user's function, with the metrics of `usual`, the package's loss of the same tokens.

    Raises:
        ConfigError: it is no `Loss`, its total has no gradient or a shape, or its count is not that of `usual`.
    """
    if not isinstance(loss, Loss):
        raise ConfigError(f"{what} returned a {type(loss).__name__}", expected=f"a {Loss.__module__}.Loss")
    if loss.total.ndim or (torch.is_grad_enabled() and not loss.total.requires_grad):
        found = f"has the shape {list(loss.total.shape)}" if loss.total.ndim else "has no gradient"
        raise ConfigError(f"the total of {what} {found}", expected="a differentiable sum over tokens")
    if float(loss.count) != float(usual.count):
        expected = f"{float(usual.count):g}, {count}; weights of tokens or rows belong into the total"
        raise ConfigError(f"the count of {what} is {float(loss.count):g}", expected=expected)
    return Loss(loss.total, usual.count, {**usual.metrics, **loss.metrics})
