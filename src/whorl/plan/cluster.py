"""A cluster as a TOML file: its devices and the links between them.

devices_per_node = 8
flops = 4e14              # per second of one device, as a training step reaches them in its type of numbers
memory_bytes = 80e9       # of one device
layer_seconds = 5e-5      # of one layer and micro-batch, forward and backward, of any size; default 0

[node]                    # between two devices of a node
latency = 5e-6            # seconds of a message
bandwidth = 4e11          # bytes per second that a device sends

[network]                 # between devices of two nodes; default: as in a node
latency = 1e-5
bandwidth = 5e10
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from whorl.errors import ConfigError
from whorl.machine.device_probe import Machine


class Link(BaseModel):
    """latency: seconds of a message; bandwidth: bytes per second that one device sends."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    latency: float = Field(ge=0)
    bandwidth: float = Field(gt=0)


class ClusterSpec(BaseModel):
    """The fields at the top of this file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    devices_per_node: int = Field(ge=1)
    flops: float = Field(gt=0)
    memory_bytes: float = Field(gt=0)
    layer_seconds: float = Field(default=0.0, ge=0)
    node: Link
    network: Link | None = None

    @classmethod
    def read(cls, path: Path) -> ClusterSpec:
        """Read a file.

        Raises:
            ConfigError: it cannot be read, or a field is missing, unknown or out of range.
        """
        try:
            return cls.model_validate(tomllib.loads(path.read_text("utf-8")))
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            what = getattr(error, "strerror", None) or error
            raise ConfigError(f"{path}: {what}", expected="a TOML file that describes a cluster") from error
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(
                f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}",
                expected="the fields of docs/parallel.md, a cluster",
            ) from error

    @classmethod
    def of_machine(cls, machine: Machine, ranks: int, mfu: float = 0.4) -> ClusterSpec:
        """Return this machine as one node of `ranks` devices that share its cores and memory. mfu: of a training step."""
        busy = max(1.0, ranks / machine.cores) if machine.device == "cpu" else 1.0
        link = Link(latency=1e-4, bandwidth=machine.memory_bandwidth / 8)  # gloo: several copies, in blocks
        return cls(
            devices_per_node=ranks,
            flops=mfu * machine.peak_flops / (machine.threads if machine.device == "cpu" else 1) / busy,
            memory_bytes=machine.ram_bytes / ranks,
            node=link,
        )

    def link(self, stride: int, size: int) -> Link:
        """Return the slowest link of an axis: `size` ranks, `stride` apart."""
        inside = stride * size <= self.devices_per_node
        return self.node if inside or self.network is None else self.network
