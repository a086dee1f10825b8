"""Selects the weight matrices. Only they get weight decay and muP's scaled learning rates (`mup.py`).

Decay moves a weight towards zero, with different effects. A matrix between two norms computes the same function when
scaled, so decay only sets the effective step size (van Laarhoven 2017, arXiv:1706.05350); before a softmax it bounds
the logits. A decaying gain silences its layer. Biases, temperatures and state-space decay rates have other neutral
values than zero. Rare embedding rows would decay between their uses.

So the *layer type* decides, not the number of dimensions: [n_heads, 1] temperatures, [n_heads, distances] position
biases, [inner, d_state] decay rates and short convolution filters have two dimensions and are not matrices.

    decays          weights of linear layers, experts, routers and convolutions; an untied language-model head
    does not        gains, biases, temperatures, gates, recurrence decay rates, filters, embeddings (a tied head too),
                    learned positions, lookup tables
"""

from __future__ import annotations

from torch import nn

from whorl.nn.convolution import Conv2d, ConvTranspose2d
from whorl.nn.experts import Experts, MoERouter
from whorl.nn.linear import Linear

MATRIX_LAYERS = (
    Linear, MoERouter, Conv2d, ConvTranspose2d,
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def decayed_parameters(networks: nn.Module) -> set[str]:
    """Names of the weight matrices over all modules of `networks`."""
    found = set()
    for path, module in networks.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, Experts):
            found |= {prefix + name for name, _ in module.named_parameters()}
        elif isinstance(module, MATRIX_LAYERS):
            found.add(f"{prefix}weight")
        found |= {prefix + name for name in getattr(module, "own_matrices", ())}
    return found & {name for name, _ in networks.named_parameters()}
