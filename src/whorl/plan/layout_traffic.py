"""Traffic of one rank in a training step under a layout, computed from shapes alone: calls and bytes by axis.

b: rows of a micro-batch, T: length, t = T / cp, d: width, e: bytes of an activation, m: micro-batches, H = b t d e.

    axis   of each micro-batch                                                       once per step
    tp     a block: 4 all-gathers and 4 all-to-alls of H; embedding, final norm
           and loss, too
    cp     a block: keys and values (cp - 1) times forward and backward, their
           gradients cp times in fp32
    ep     a block with experts: counts, and 4 all-to-alls of b t top_k rows
    pp     H / tp to the next stage and as much back
    fsdp   ZeRO 3: parameters twice, gradients once; ZeRO 2: gradients once          ZeRO 1, 2: parameters; ZeRO 1: gradients
    update                                                                           gradients over axes with copies;
                                                                                     matrices to their owner and back

`parallel/traffic.py` counts the same, and a test holds the two equal. An all-reduce of P bytes sends as much as a
reduce-scatter and an all-gather, so ZeRO 1 and 2 send what data parallelism sends, ZeRO 3 half as much again. (Head and
embedding are not gathered for the backward, which needs neither.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from functools import cache
from math import ceil, prod
from typing import Any

from whorl.models import Transformer
from whorl.models.parallel_parts import tensor_shards
from whorl.nn.experts import MixtureOfExperts
from whorl.objectives.next_token import default_chunk_tokens
from whorl.parallel.layout import AXES, Layout, expert_owners, place_parameters
from whorl.parallel.pipeline import stage_numbers
from whorl.parallel.traffic import Total, sent_share

Key = tuple[str, str]  # axis, operation
Add = Callable[[str, str, float, float], None]  # axis, operation, calls, payload of each


_shards = cache(tensor_shards)


class StepShape:
    """A step of a model under a layout.

    Args:
        model: whole, on any device (meta is enough).
        rows: of the step, over all ranks; length: of a row; micro_batches: of a rank.
        packed: rows have several documents.
        chunk_tokens: of the loss, None for its default.
    """

    def __init__(
        self, model: Transformer, layout: Layout, *, rows: int, length: int, micro_batches: int = 1,
        packed: bool = False, chunk_tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.layout, self.packed, self.length = model, layout, packed, length
        self.micro_batches, self.chunk_tokens = micro_batches, chunk_tokens
        self.rows = rows // layout.data_ranks // micro_batches
        self.positions = length // layout.cp
        per_rank = len(stage_numbers(layout.pp, 0, layout.schedule))
        self.n_stages = per_rank * layout.pp
        self.bounds = [len(model.blocks) * n // self.n_stages for n in range(self.n_stages + 1)]
        owners = expert_owners(model, layout.ep)
        self.places = place_parameters(model, layout, _shards(model), self.bounds, owners)

    def stages(self, pp: int) -> list[int]:
        """Return the stages of a rank of the pipeline axis."""
        return stage_numbers(self.layout.pp, pp, self.layout.schedule)

    def blocks(self, pp: int) -> list[int]:
        """Return the blocks of a rank of the pipeline axis."""
        return [n for stage in self.stages(pp) for n in range(self.bounds[stage], self.bounds[stage + 1])]

    def held(self, at: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of a rank's parameters before FSDP2 splits them, by name. at: its coordinates."""
        found = {}
        for name, place in self.places.items():
            if place.holds(at):
                shape, shard = list(place.shape), place.shard
                if isinstance(shard.dim, int):
                    parts = shard.sections or (shape[shard.dim],)
                    shape[shard.dim] = sum(-(-n // self.layout.tp) for n in parts)
                found[name] = tuple(shape)
        return found

    def traffic(self, rank: int) -> dict[Key, Total]:
        """Return what a rank sends between the start of a step and the end of its last backward."""
        at, layout, m = self.layout.at(rank), self.layout, self.micro_batches
        sums: dict[Key, list[float]] = defaultdict(lambda: [0, 0, 0.0])

        def add(axis: str, operation: str, calls: float, payload: float) -> None:
            size = getattr(layout, axis)
            if size > 1 and calls:
                entry = sums[axis, operation]
                entry[0] += calls
                entry[1] += calls * payload
                entry[2] += calls * payload * sent_share(operation, size)

        dtype, config = self.model.dtype, self.model.config
        e, tokens = dtype.itemsize, self.rows * self.positions
        hidden = tokens * config.d_model * e
        stages = self.stages(at["pp"])
        for number in self.blocks(at["pp"]):
            for operation in ("all_gather", "all_to_all"):
                add("tp", operation, 4 * m, hidden)
            self._add_block(add, number, tokens, e)
        if 0 in stages:
            width = 4 if config.embedding_norm else e
            add("tp", "all_reduce", m, self.rows * self.length * config.d_model * 4)
            add("tp", "all_gather", m, tokens * config.d_model * width)
        if self.n_stages - 1 in stages:
            vocabulary = ceil(config.vocab_size / layout.tp)
            chunk = self.chunk_tokens or default_chunk_tokens(vocabulary)
            add("tp", "all_gather", m, hidden)
            add("tp", "all_to_all", m, hidden)
            chunks = ceil(tokens / chunk)
            add("tp", "all_reduce", 2 * m * chunks, tokens * 12 / (2 * chunks))  # a maximum; two sums
        for stage in stages:
            for other in (stage - 1, stage + 1):
                if 0 <= other < self.n_stages and other not in stages:
                    add("pp", "send", m, hidden / layout.tp)
        self._add_fsdp(add, at)
        return {key: Total(round(n), round(p), s) for key, (n, p, s) in sums.items()}

    def update_traffic(self, rank: int, wholes: Collection[str]) -> dict[Key, Total]:
        """Return what a rank sends in an update; "dp+cp" are the ranks of both axes, "world" all.

        wholes: matrices that go to one owner and back, as Muon's. Their bytes are those of a mean rank.
        """
        at, layout = self.layout.at(rank), self.layout
        sizes = dict(zip(AXES, layout.shape, strict=True))
        by_axes: dict[tuple[str, ...], float] = defaultdict(float)
        tied = 0.0
        for name, shape in self.held(at).items():
            place = self.places[name]
            if not name.startswith("memory."):
                rows = shape[0]
                if place.sharded:
                    step = ceil(rows / layout.fsdp)
                    rows = min(rows, step * (at["fsdp"] + 1)) - min(rows, step * at["fsdp"])
                by_axes[place.sums] += 4 * rows * prod(shape[1:])
                tied += 4 * rows * prod(shape[1:]) if len(place.stages) > 1 else 0.0
        found: dict[Key, Total] = {}
        entries = [
            ("+".join(a for a in AXES if a in axes and sizes[a] > 1), n) for axes, n in by_axes.items()
        ]
        for axes, n in [entry for entry in entries if entry[0]] + ([("ends", tied)] if tied else []):
            size = 2 if axes == "ends" else prod(sizes[a] for a in axes.split("+"))
            old = found.get((axes, "all_reduce"), Total(0, 0, 0.0))
            sent = n * sent_share("all_reduce", size)
            found[axes, "all_reduce"] = Total(old.calls + 1, old.payload + round(n), old.sent + sent)
        if wholes and layout.ranks > 1:
            moved = 0.0
            for name in wholes:
                place = self.places[name]
                parts = layout.fsdp * (layout.tp if isinstance(place.shard.dim, int) else 1)
                holders = layout.ranks / layout.pp / (1 if place.expert is None else layout.ep)
                moved += 4 * place.shape.numel() * (1 + holders / parts) / layout.ranks
            share = sent_share("all_to_all", layout.ranks)
            found["world", "all_to_all"] = Total(2, round(moved), moved * share)
        return found

    def _add_block(self, add: Add, number: int, tokens: int, e: int) -> None:
        layout, m, config = self.layout, self.micro_batches, self.model.config
        block: Any = self.model.blocks[number]
        mixer, mlp = block.mixer, block.mlp
        if layout.cp > 1:
            keys = tokens * mixer.n_kv_heads // layout.tp * mixer.head_dim
            add("cp", "send", 2 * m * (layout.cp - 1), 2 * keys * e)
            add("cp", "send", m * layout.cp, 2 * keys * max(e, 4))
            if self.packed:
                add("cp", "all_gather", m, layout.cp * tokens * 8)
            if mixer.smear is not None:
                lasts = layout.cp * 2 * self.rows
                features = mixer.n_kv_heads // layout.tp * mixer.head_dim
                add("cp", "all_gather", m, lasts * features * e)
                add("cp", "all_gather", m, lasts * 8)
                add("cp", "all_reduce", m, lasts * features * e)
        if isinstance(mlp, MixtureOfExperts):
            assert config.experts is not None
            add("ep", "all_to_all", m, config.experts.n_experts * 8)
            add("ep", "all_to_all", 4 * m, tokens * config.experts.top_k * config.d_model * e)

    def _add_fsdp(self, add: Add, at: Mapping[str, int]) -> None:
        """Add one group per block and one for the rest; each parameter is padded to a multiple of the ranks."""
        layout, m = self.layout, self.micro_batches
        groups: dict[str, int] = defaultdict(int)
        for name, shape in self.held(at).items():
            if not name.startswith("memory."):
                group = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
                groups[group] += 4 * layout.fsdp * ceil(shape[0] / layout.fsdp) * prod(shape[1:])
        # Only blocks are gathered for the backward again. A pipeline keeps parameters from a backward to the next
        # forward, and sums gradients once.
        piped = layout.pp > 1
        for group, payload in groups.items():
            again = layout.zero == 3 and group
            gathers = (m + 1 if piped else 2 * m) if again else m if layout.zero == 3 and not piped else 1
            add("fsdp", "all_gather", gathers, payload)
            add("fsdp", "all_to_all", 1 if layout.zero == 1 or piped else m, payload)
