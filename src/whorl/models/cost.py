"""What a network costs, asked of the network: the answers of those that have no formula of their own.

A `LanguageModel` reckons its arithmetic from its shape (`models/language_model.py`), and pictures' models theirs (`flops`). The
others, an encoder, two towers, a captioner, further heads, are asked in another way: their forward is run once on an
example, and the products are counted as they pass. That is exact and needs no formula to be kept true. Activations are
measured: what autograd keeps of two rows, less what it keeps of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from whorl.models.language_model import saved_bytes


class ProfiledModule(nn.Module, ABC):
    """A network that answers what it costs. `example` says what it is fed with; `size` is a length, or a picture's side."""

    @abstractmethod
    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Arguments of `forward` for `batch` rows."""

    def profiled_forward(self, *inputs: Tensor) -> object:
        """What is counted: `forward`."""
        return self(*inputs)

    def params(self) -> dict[str, int]:
        """Parameters: total; active (those that an input meets); embedding (tables of ids)."""
        total = sum(p.numel() for p in self.parameters())
        tables = [p for name, p in self.named_parameters() if name.rpartition(".")[2] == "embedding"]
        return {"total": total, "active": total, "embedding": sum(p.numel() for p in tables)}

    def flops(self, size: int) -> float:
        """Floating-point operations of the products of one input, forward."""
        inputs = self.example_inputs(1, size, next(self.parameters()).device)
        with _preserve_buffers(self), FlopCounterMode(display=False) as counter, torch.no_grad():
            self.profiled_forward(*inputs)
        return float(counter.get_total_flops())

    def kv_bytes_per_token(self) -> int:
        """Bytes that a state grows by with each further position: nothing, where nothing is decoded."""
        return 0

    def activation_bytes(self, batch: int, size: int) -> int:
        """Bytes that the forward pass keeps for the backward one; on the network's own device."""
        device = next(self.parameters()).device

        def kept(rows: int) -> int:
            inputs = self.example_inputs(rows, size, device)
            return saved_bytes(lambda: self.profiled_forward(*inputs), [*self.parameters(), *inputs])

        with _preserve_buffers(self):
            return batch * (kept(2) - kept(1))


class ProfiledTextModule(ProfiledModule):
    """One whose `size` is a number of tokens."""

    def flops_per_token(self, length: int) -> float:
        """Of one training token of an input of that length, forward + backward (twice the forward)."""
        return 3.0 * self.flops(length) / length


@contextmanager
def _preserve_buffers(network: nn.Module) -> Iterator[None]:
    """Running statistics are put back: an example is not data."""
    kept = [(b, b.clone()) for b in network.buffers()]
    try:
        yield
    finally:
        for buffer, old in kept:
            buffer.copy_(old)
