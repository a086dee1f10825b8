"""Settings of experts in the stages after pretraining: load balancing, frozen routers, rates of experts.

They are those of pretraining (`RoutingConfig`, `OptimConfig.expert_lr_scales`). A setting without an effect is refused.
"""

from __future__ import annotations

from whorl.align.config import StageConfig
from whorl.align.model.policy_model import PolicyModel
from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.nn.experts import MixtureOfExperts
from whorl.train.config import RoutingConfig
from whorl.train.learner.update import ParamOptim
from whorl.train.lm.objective import freeze_routers_from

TRAINED = (
    "train.routing.freeze_router_step",
    "train.expert_lr_scales",
)  # of weights that an adapter leaves alone


def check_expert_settings(model: LanguageModel, config: StageConfig, stage: str) -> None:
    """Check that the model has experts where their settings are changed, and that the stage trains them.

    Raises:
        ConfigError: names the first setting without an effect.
    """
    usual = RoutingConfig()
    changed = [
        f"train.routing.{n}"
        for n in RoutingConfig.model_fields
        if getattr(config.train.routing, n) != getattr(usual, n)
    ]
    changed += ["train.expert_lr_scales"] if config.train.expert_lr_scales != 1 else []
    if changed and not any(isinstance(module, MixtureOfExperts) for module in model.modules()):
        raise ConfigError(
            f"{stage}.{changed[0]} is set, and the model has no experts",
            expected="a mixture of experts",
            do=f"remove {changed[0]}",
        )
    of_weights = [name for name in changed if name in TRAINED]
    if of_weights and config.model.lora is not None:
        raise ConfigError(
            f"{stage}.{of_weights[0]} is set, and {stage}.model.lora trains neither routers nor experts",
            expected="one of the two",
            do=f"remove {of_weights[0]}",
        )


def stage_param_optims(
    network: PolicyModel, config: StageConfig, updates_per_step: int = 1
) -> dict[str, ParamOptim]:
    """Return the optimizer of each trained parameter, with routers frozen from the configured step of the stage on.

    updates_per_step: optimizer steps per step of the stage.
    """
    step = config.train.routing.freeze_router_step
    found = network.param_optims(config.optim())
    return freeze_routers_from(network, found, None if step is None else step * updates_per_step)
