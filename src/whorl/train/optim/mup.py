"""muP: tune learning rates on a narrow model, use them on a wide one (Yang et al. 2022, arXiv:2203.03466).

Adam changes each matrix entry by about the learning rate, independent of the gradient's size. The layer's output, a sum
over d aligned inputs, changes by about lr x d. So at twice the width the best learning rate halves. muP keeps the
change of each layer's output independent of the width (table 8; as spectral norms: Yang, Simon & Bernstein 2023,
arXiv:2310.17813). With m = d_model / mup_base_width,

                                   initial std     lr, Adam        lr, Muon
    embedding, positions           constant        constant        -
    gains, biases, temperatures    constant        constant        -
    matrices of the blocks         ~ d^-1/2        / m             constant: its steps have a fixed spectral norm
    head, routers                  ~ d^-1 (1)      / m             -

(1) The paper's head may also start at zero. A router's d^-1/2 gives scores of equal size at any width.

All matrices already start at d^-1/2 or zero (`nn`), and Muon's step has the spectral norm lr * sqrt(max(1, rows /
columns)). So under Muon only the head and the routers change. Scale the number of heads, not their size (so 1 /
sqrt(head_dim) is constant), and sizes inside a block in proportion to d_model. Fixed sizes (a latent rank) are treated
as if they scaled. Adam's weight decay is lr x decay per step and stays constant, so decay is multiplied by m. A tied
head would need two learning rates and is rejected. At d_model = mup_base_width no bit changes.
"""

from __future__ import annotations

import torch

from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.train.config import OptimConfig


def inverse_width_mult(model: LanguageModel, optim: OptimConfig) -> float:
    """Return 1 / m of the table above; 1 without muP.

    Raises:
        ConfigError: the head is tied to the embedding.
    """
    if optim.mup_base_width is None:
        return 1.0
    if model.head is None:
        raise ConfigError(
            f"optim.mup_base_width is {optim.mup_base_width}, but the model's head is tied to its embedding",
            expected="an untied head: embedding and head need different learning rates",
            do="set tie_embeddings = false, or remove mup_base_width",
        )
    return optim.mup_base_width / int(model.config.d_model)


@torch.no_grad()
def scale_head_init(model: LanguageModel, optim: OptimConfig) -> None:
    """Scale the initial head of a new model by 1 / m; with a fixed standard deviation its logits would grow with the width.

    Raises:
        ConfigError: as `inverse_width_mult`.
    """
    share = inverse_width_mult(model, optim)
    if share != 1.0:
        assert model.head is not None
        model.head.mul_(share)
