"""The language-model update: next-token prediction, and the optimizer of each parameter.

It trains every `LanguageModel` (`models/language_model.py`) and uses only `prepare`, `trunk` and the head. `trunk` and
the loss are compiled together, for rows of one shape.
"""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whorl.models import LanguageModel
from whorl.nn import Linear
from whorl.nn.compiler import compiled
from whorl.nn.cpu.linear import weight_gradient
from whorl.nn.experts import Experts, expert_lr_scales, router_parameter_names
from whorl.nn.gpu.dispatch import logits_step
from whorl.objectives.generative import masked
from whorl.objectives.next_token import Loss, next_token
from whorl.train.config import MASKED, OptimConfig
from whorl.train.learner.update import MicroBatch, ParamOptim
from whorl.train.lm.token_objective import own_objective
from whorl.train.metrics.moe_balance import MoEBalancer
from whorl.train.optim.decay_mask import decayed_parameters
from whorl.train.optim.mup import inverse_width_mult
from whorl.train.optim.optimizer import get_optimizer


def param_optims(model: LanguageModel, optim: OptimConfig) -> dict[str, ParamOptim]:
    """Return `optim.optimizer` (Muon) for the blocks' matrices, sparse Adagrad for n-gram tables, else AdamW.

    The blocks' matrices are the weights of linear layers and experts; routers, convolution filters and state-space
    decay rates are not included. Weight decay covers a larger set (`decay_mask.py`). muP scales learning rates by width
    (`mup.py`), and `expert_lr_scales` those of experts.
    """
    share, decaying = inverse_width_mult(model, optim), decayed_parameters(model)

    def scaled(name: str, rate: float, rule: str = "adamw") -> ParamOptim:
        return ParamOptim(rule, rate * share, 1 / share) if name in decaying else ParamOptim(rule, rate)

    matrices = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Linear | Experts) and path.startswith("blocks.")
        for name, p in module.named_parameters(recurse=isinstance(module, Experts))
        if p.ndim == 2 and min(p.shape) > 1
    }
    found = {}
    for name, _ in model.named_parameters():
        if name.startswith("memory."):
            found[name] = ParamOptim("sparse_adagrad", optim.lr_ngram)
        elif name in ("embedding", "head", "positions"):
            found[name] = scaled(name, optim.lr_embedding)
        elif name not in matrices:
            found[name] = scaled(name, optim.lr_scalar)
        elif get_optimizer(optim.optimizer).width_scaled:
            found[name] = scaled(name, optim.lr_adamw, optim.optimizer)
        else:
            found[name] = ParamOptim(optim.optimizer, optim.lr_muon, decay_scale=1.0)
    if optim.expert_lr_scales != 1:
        for name, scale in _expert_scales(model, optim.expert_lr_scales).items():
            found[name] = replace(found[name], lr=found[name].lr * scale)
    return found


def _expert_scales(model: LanguageModel, scales: float | Mapping[int, float]) -> dict[str, float]:
    """Return the multiplier of each expert's parameters by name. Raises ConfigError as `expert_lr_scales`."""
    if isinstance(scales, Mapping):
        return expert_lr_scales(model, scales)
    sizes = [len(m) for m in model.modules() if isinstance(m, Experts)]
    return expert_lr_scales(model, dict.fromkeys(range(max(sizes, default=0)), scales))


def freeze_routers_from(
    network: nn.Module, param_optims: Mapping[str, ParamOptim], step: int | None
) -> dict[str, ParamOptim]:
    """Return `param_optims` with the parameters of all routers frozen from `step` on; None changes nothing."""
    trained = (n for n in router_parameter_names(network) if n in param_optims)
    return {**param_optims, **{n: replace(param_optims[n], freeze_step=step) for n in trained}}


class LMObjective:
    """Next-token loss of a micro-batch.

    Rows with one document each, the common case, take the compiled path without a document mask. Packed rows, with
    segments and positions, are compiled for one shape, if it is given. Models with experts are not compiled: the shapes
    of their products depend on the routing.

    packed_shape: [rows, length] of the packed micro-batches to compile; others run uncompiled.
    objective: of users in place of the next-token loss (`token_objective.py`); nothing is compiled for it.
    length: of the rows to compile, None for all. In a short run the longer ones at its end do not pay for a compilation.
    """

    def __init__(
        self,
        model: LanguageModel,
        moe: MoEBalancer,
        *,
        z_loss: float,
        compile: bool,
        chunk_tokens: int | None = None,
        packed_shape: tuple[int, int] | None = None,
        length: int | None = None,
        objective: str = "next_token",
    ) -> None:
        self.own = None if objective == MASKED else own_objective(objective)
        self.model, self.z_loss, self.moe, self.chunk_tokens = model, z_loss, moe, chunk_tokens
        self.compiled_loss: Callable[..., tuple[Tensor, ...]] = self._loss
        self.packed_shape, self.length = packed_shape, length
        self.packed_loss = compiled(self._loss) if packed_shape else self._loss
        if compile and not moe:
            self.compiled_loss = compiled(self._loss)

    def _loss(
        self,
        x: Tensor,
        positions: Any,
        targets: Tensor,
        mask: Tensor,
        segments: Tensor | None = None,
        routings: list[Any] | None = None,
    ) -> tuple[Tensor, ...]:
        model = self.model
        hidden = model.trunk(x, positions, segments, routings=routings)[:, : targets.shape[1]]
        loss = next_token(
            hidden.flatten(0, 1),
            model.head_weight,
            targets.flatten(),
            mask.flatten(),
            self.z_loss,
            model.logit_softcap,
            select_step=model.select_logits_step or logits_step,
            chunk_tokens=self.chunk_tokens,
            weight_gradient=weight_gradient,
        )
        return loss.total, loss.count, loss.metrics["nll"]

    def hidden(self, micro_batch: MicroBatch) -> tuple[Tensor, Loss]:
        """Return the hidden states of a pipeline stage before the last, and its auxiliary losses."""
        segments = micro_batch.get("segment_ids")
        positions = None if segments is None else micro_batch["positions"]
        x, where = self.model.prepare(micro_batch["tokens"], positions, segments)
        records: Any = UserList()  # FSDP2 gives its modules copies of plain lists
        hidden = self.model.trunk(x, where, segments, routings=records if self.moe else None)
        zero = hidden.new_zeros((), dtype=torch.float32)
        loss = Loss(zero, zero, {"nll": zero})
        return hidden, self.moe.add_aux_losses(loss, records, micro_batch["loss_mask"]) if self.moe else loss

    def _masked(self, micro_batch: MicroBatch) -> Loss:
        ids, weights = micro_batch["tokens"], micro_batch["weights"]
        packed = micro_batch.get("segment_ids"), micro_batch.get("positions")
        noisy, positions, segments = masked.inputs(ids, weights, self.model.config.masked, *packed)
        x, where = self.model.prepare(noisy, positions, segments)
        loss = self.compiled_loss if packed[0] is None else self._loss
        total, _, nll = loss(x, where, ids, weights, segments)
        return Loss(total, micro_batch["loss_mask"].sum().float(), {"nll": nll})

    def __call__(self, micro_batch: MicroBatch) -> Loss:
        if "row" in micro_batch:
            self.moe.draw_rows(int(micro_batch["seed"][0]), micro_batch["row"])
        if "weights" in micro_batch:
            return self._masked(micro_batch)
        segments = micro_batch.get("segment_ids")
        positions = None if segments is None else micro_batch["positions"]
        x, where = self.model.prepare(micro_batch["tokens"], positions, segments)
        rest = micro_batch["targets"], micro_batch["loss_mask"]
        records: Any = UserList()  # FSDP2 gives its modules copies of plain lists
        if self.own is not None:
            hidden = self.model.trunk(x, where, segments, routings=records if self.moe else None)
            loss = self.own(self.model.logits(hidden), *rest)
            return self.moe.add_aux_losses(loss, records, rest[1]) if self.moe else loss
        if self.moe:
            total, count, nll = self._loss(x, where, *rest, segments, records)
            return self.moe.add_aux_losses(
                Loss(total, count, {"nll": nll}), records, micro_batch["loss_mask"]
            )
        if segments is None:
            is_compiled = self.length in (None, micro_batch["tokens"].shape[1])
            total, count, nll = (self.compiled_loss if is_compiled else self._loss)(x, where, *rest)
        else:
            packed = self.packed_loss if micro_batch["tokens"].shape == self.packed_shape else self._loss
            total, count, nll = packed(x, where, *rest, segments)
        return Loss(total, count, {"nll": nll})
