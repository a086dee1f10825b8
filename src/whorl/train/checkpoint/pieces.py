"""The tensors that one rank of a world writes into a checkpoint and reads from one.

A tensor that all ranks hold is written by its owner. Of a DTensor (FSDP, tensor parallelism) each rank writes its local
part, with the shape of the whole and the position of the part; of equal copies the first is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from whorl.parallel.process_group import ProcessGroup
from whorl.train.checkpoint.format import restore
from whorl.train.checkpoint.staging import first_position, is_sharded

if TYPE_CHECKING:
    from whorl.train.checkpoint.manager import CheckpointManager

Part = tuple[tuple[int, ...], tuple[int, ...]]  # shape of the whole tensor, first position of the part


def own_tensors(
    tensors: Mapping[str, Tensor], owners: Mapping[str, int], rank: int
) -> tuple[dict[str, Tensor], dict[str, Part]]:
    """Return the tensors that this rank writes, and which part of the whole those are that are no whole tensors.

    owners: rank by parameter name; other tensors are rank 0's.
    """
    found, parts = dict[str, Tensor](), dict[str, Part]()
    for name, tensor in tensors.items():
        kind, _, path = name.partition("/")
        if is_sharded(tensor):
            coordinate = tensor.device_mesh.get_coordinate()
            copies = [n for n, placement in enumerate(tensor.placements) if not placement.is_shard()]
            if (
                coordinate is not None
                and not any(coordinate[n] for n in copies)
                and tensor.to_local().numel()
            ):
                found[name], parts[name] = tensor.to_local(), (tuple(tensor.shape), first_position(tensor))
        elif owners.get(path.rpartition("/")[0] if kind == "state" else path, 0) == rank:
            found[name] = tensor
    return found, parts


def restore_named(
    checkpoints: CheckpointManager | None, folder: Path, tensors: Mapping[str, Tensor], group: ProcessGroup
) -> None:
    """Copy the state in `folder` into `tensors`. Every rank calls this; `checkpoints`: of those that write.

    Raises:
        CheckpointError: it is missing or damaged, or of other tensors.
    """
    if checkpoints is not None:
        checkpoints.finish()
    group.all_gather_scalars()  # rank 0 has finished the index
    if checkpoints is not None:
        found = checkpoints.load_named(folder)
        restore(tensors, {n: t for n, t in found.items() if group.shares_memory or n in tensors})
    group.all_gather_scalars()
