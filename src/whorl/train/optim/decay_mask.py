"""Which parameters layers multiply with: the matrices. Weight decay is theirs alone, and muP's rates are (`mup.py`).

Decay pulls a weight towards zero, and that means different things. A matrix between two norms keeps its function when it
shrinks, so decay only sets how far a step turns it (van Laarhoven 2017, arXiv:1706.05350); before a softmax it bounds the
logits. A gain that shrinks silences its layer. A bias, a temperature or a state space's decay rate has another resting
place than zero. A row of an embedding that is rarely met would fade between two meetings.

So what decays is said by the *layer*, not by the number of dimensions: [n_heads, 1] temperatures, [n_heads, distances]
position biases, [inner, d_state] decay rates and the taps of a short convolution (one filter a feature) have two dimensions
and are no matrices.

    decays      weights of linear layers, experts, routers and convolutions; a language model's head, unless it is tied
    does not    gains, biases, temperatures, gates, recurrences' decay rates, taps, embeddings (a tied head is one),
                learned positions, look-up tables
"""

from __future__ import annotations

from torch import nn

from whorl.models.language_model import LanguageModel
from whorl.nn.convolution import Conv2d, ConvTranspose2d
from whorl.nn.experts import Experts, MoERouter
from whorl.nn.linear import Linear

MATRIX_LAYERS = (
    Linear, MoERouter, Conv2d, ConvTranspose2d,
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def decayed_parameters(networks: nn.Module) -> set[str]:
    """Names of the weights that layers multiply with, over all modules of `networks`."""
    found = set()
    for path, module in networks.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Experts):
            found |= {prefix + name for name, _ in module.named_parameters()}
        elif isinstance(module, MATRIX_LAYERS):
            found.add(f"{prefix}weight")
        elif isinstance(module, LanguageModel) and module.head is not None:
            found.add(f"{prefix}head")
    return found & {name for name, _ in networks.named_parameters()}
