"""muP: learning rates found on a narrow model, used on a wide one (Yang et al. 2022, arXiv:2203.03466).

A step of Adam moves every entry of a matrix by about the rate, whatever its gradient. What the layer gains by it, summed
over its d inputs, which the step is aligned with, is about rate x d: at twice the width the same rate changes the layer's
output twice as much, and the best rate halves. The remedy (table 8 there; read as a condition on spectral norms in Yang,
Simon & Bernstein 2023, arXiv:2310.17813): a step should change the output of each layer by as much at any width. With
m = d_model / base_width,

                                   initial std     rate, Adam      rate, Muon
    embedding, positions           constant        constant        -
    gains, biases, temperatures    constant        constant        -
    matrices of the blocks         ~ d^-1/2        / m             constant: its steps are of one spectral norm
    head, routers                  ~ d^-1 (1)      / m             -

(1) The paper's head may also start at zero; a router's d^-1/2 gives scores of one size at any width, on which the choice
of experts at the first step rests.

What the house has of it already: all matrices start at d^-1/2 or zero (`nn`), and Muon's step has the spectral norm
rate * sqrt(max(1, rows / columns)), which is arXiv:2310.17813's up to a constant for each kind of matrix. So under Muon
`base_width` changes the head and the routers alone. Heads have to grow in number, not in size (then attention's usual
1 / sqrt(head_dim) is the same at all widths), and what is inside a block in proportion to d_model; sizes that stay (the
rank of a latent) are treated as if they grew.

Weight decay under Adam is rate x decay a step, and is to stay: so the decay of what has the rate / m is times m.
A tied head would need one rate for two roles (table 8 gives it a multiplier on the logits instead): refused.
At d_model = base_width nothing is changed, to the bit.
"""

from __future__ import annotations

import torch

from whorl.errors import ConfigError
from whorl.models import LanguageModel
from whorl.train.config import OptimConfig


def inverse_width_mult(model: LanguageModel, optim: OptimConfig) -> float:
    """1 / m of the table above; 1 without muP.

    Raises:
        ConfigError: the head is tied to the embedding.
    """
    if optim.mup_base_width is None:
        return 1.0
    if model.head is None:
        raise ConfigError(
            f"optim.base_width is {optim.mup_base_width} and the model's head is tied to its embedding",
            expected="a head of its own: an embedding and a head want different rates as a model grows",
            do="set tie_embeddings = false, or leave base_width out",
        )
    return optim.mup_base_width / int(model.config.d_model)


@torch.no_grad()
def scale_head_init(model: LanguageModel, optim: OptimConfig) -> None:
    """Scales the initial head of a new model by 1 / m: drawn with one standard deviation at all widths, its logits would
    grow with the square root of the width. Raises: as `narrowing`."""
    share = inverse_width_mult(model, optim)
    if share != 1.0:
        assert model.head is not None
        model.head.mul_(share)
