"""Training of multi-token heads on a trained model, for speculative decoding (`models/multi_token.py`).

    frozen trunk    loss = sum over heads i of - log p_i(x_(t+i) | h_t)       only the heads are trained
    live trunk      the same + the model's own next-token loss               trunk and heads are trained

Differences from SFT (`stage/sft.py`): the objective, and what is trained. A frozen trunk keeps the model's weights
and outputs. With a live trunk they change, as in Gloeckle et al. 2024, arXiv:2404.19737.

The count is the number of predictions of all heads (and of the model), so the mean does not grow with their number.
"""

from __future__ import annotations

import torch

from whorl.align.config import MultiTokenConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.align.stage.sft import SFTTask
from whorl.align.stage.task import StageTask
from whorl.models import LanguageModel
from whorl.models.multi_token import MultiTokenPrediction, multi_token_loss
from whorl.nn.gpu.dispatch import logits_step
from whorl.objectives.next_token import Loss, next_token
from whorl.tracking.seeds import generator
from whorl.train.config import OptimConfig
from whorl.train.learner.loop import Stopwatch
from whorl.train.learner.update import MicroBatch, ParamOptim
from whorl.train.optim.optimizer import get_optimizer

HEAD_WIDTH = 64  # of the attention heads in the blocks, where the model's width allows it


class MultiTokenModel(PolicyModel):
    """A model with multi-token heads.

    Args:
        model: the trunk, in its compute dtype and on its device.
        config: number and size of the heads, and whether the trunk is trained.
    """

    def __init__(self, model: LanguageModel, config: MultiTokenConfig) -> None:
        super().__init__(model, seed=config.seed)
        self.train_trunk = config.train_trunk
        width = int(model.config.d_model)
        n_heads = next(n for n in range(max(1, width // HEAD_WIDTH), 0, -1) if width % (2 * n) == 0)
        self.heads = MultiTokenPrediction(
            width, config.n_predict, n_heads, mlp_hidden=config.mlp_hidden,
            generator=generator(config.seed, "multi_token"), dtype=model.dtype,
        ).to(self.device)  # fmt: skip
        if not self.train_trunk:
            model.requires_grad_(False)

    def param_optims(self, optim: OptimConfig) -> dict[str, ParamOptim]:
        """Return the optimizer of each trained parameter; those of the heads as in the blocks of the model."""
        found = super().param_optims(optim) if self.train_trunk else {}
        rate = optim.lr_adamw if get_optimizer(optim.optimizer).width_scaled else optim.lr_muon
        matrix = ParamOptim(optim.optimizer, rate, decay_scale=1.0)
        gain = ParamOptim("adamw", optim.lr_scalar)
        return found | {
            f"heads.{name}": matrix if p.ndim == 2 else gain for name, p in self.heads.named_parameters()
        }


class MultiTokenTask(SFTTask):
    """Training of the heads, by `fine_tune`. Its callback receives nll, nll/1 .. nll/n, grad_norm, epoch and time/*."""

    name = "multi_token"
    network: MultiTokenModel
    config: MultiTokenConfig

    def objective(self, batch: MicroBatch) -> Loss:
        network, model = self.network, self.network.model
        with torch.set_grad_enabled(network.train_trunk):
            hidden = network.hidden(batch)
        targets, mask = batch["targets"], batch["loss_mask"]
        loss = multi_token_loss(
            network.heads,
            hidden,
            model.head_weight,
            targets,
            mask,
            batch.get("segment_ids"),
            batch.get("positions"),
        )
        if not network.train_trunk:
            return loss
        own = next_token(
            hidden.flatten(0, 1), model.head_weight, targets.flatten(), mask.flatten(),
            softcap=model.logit_softcap, select_step=logits_step,
        )  # fmt: skip
        metrics = {**loss.metrics, "nll_0": own.metrics["nll"], "count_0": own.count}
        return Loss(loss.total + own.total, loss.count + own.count, metrics)

    def _balanced_objective(self, batch: MicroBatch) -> Loss:
        """Balance the experts of a live trunk only."""
        return (
            StageTask._balanced_objective(self, batch) if self.network.train_trunk else self.objective(batch)
        )

    def report(self, steps_done: int, metrics: dict[str, float], clock: Stopwatch) -> dict[str, float] | None:
        """Return nll (nats per prediction of all heads) and nll/1 .. nll/n (of each head; nll/0 of a live trunk)."""
        found = {n: v for n, v in metrics.items() if not n.startswith(("nll_", "count_"))}
        for name, count in metrics.items():
            if name.startswith("count_") and count:
                offset = name.removeprefix("count_")
                found[f"nll/{offset}"] = metrics[f"nll_{offset}"] / count
        return super().report(steps_done, {**found, "nll": metrics["loss"]}, clock)
