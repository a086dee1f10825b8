"""Cost of networks that have no formula: FLOPs, cache bytes and activation bytes.

`LanguageModel` and the vision models compute their cost from their shape. An encoder, a dual encoder, a captioner and
multi-token heads are profiled instead: one forward on an example, with torch's FLOP counter. Activation bytes are
measured as what autograd saves for two rows minus what it saves for one.
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
    """A network that profiles itself on `example_inputs`; `size` is a length in tokens, or an image's side in pixels."""

    @abstractmethod
    def example_inputs(self, batch: int, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """Return arguments of `forward` for `batch` rows."""

    def profiled_forward(self, *inputs: Tensor) -> object:
        """Run the computation that is profiled: `forward`."""
        return self(*inputs)

    def params(self) -> dict[str, int]:
        """Count parameters: total; active (used by an input); embedding (tables of ids)."""
        total = sum(p.numel() for p in self.parameters())
        tables = [p for name, p in self.named_parameters() if name.rpartition(".")[2] == "embedding"]
        return {"total": total, "active": total, "embedding": sum(p.numel() for p in tables)}

    def flops(self, size: int) -> float:
        """Return the floating-point operations of the matrix products of one input's forward."""
        inputs = self.example_inputs(1, size, next(self.parameters()).device)
        with _preserve_buffers(self), FlopCounterMode(display=False) as counter, torch.no_grad():
            self.profiled_forward(*inputs)
        return float(counter.get_total_flops())

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of state per further position: 0 for networks that do not decode."""
        return 0

    def activation_bytes(self, batch: int, size: int) -> int:
        """Return the bytes that the forward keeps for the backward, measured on the network's own device."""
        device = next(self.parameters()).device

        def saved(rows: int) -> int:
            inputs = self.example_inputs(rows, size, device)
            return saved_bytes(lambda: self.profiled_forward(*inputs), [*self.parameters(), *inputs])

        with _preserve_buffers(self):
            return batch * (saved(2) - saved(1))


class ProfiledTextModule(ProfiledModule):
    """A profiled network whose `size` is a number of tokens."""

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of one training token in an input of `length`: forward + backward (twice the forward)."""
        return 3.0 * self.flops(length) / length


@contextmanager
def _preserve_buffers(network: nn.Module) -> Iterator[None]:
    """Restore buffers such as running statistics on exit: an example is not data."""
    saved = [(b, b.clone()) for b in network.buffers()]
    try:
        yield
    finally:
        for buffer, old in saved:
            buffer.copy_(old)
