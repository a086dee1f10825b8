"""The parts of a decoder for a layout: how each parameter is held on the tensor axis, and which parts cannot be split."""

from __future__ import annotations

import re
from typing import Any

from whorl.errors import ConfigError
from whorl.models.language_model import LanguageModel
from whorl.nn.attention.multi_head import MultiHeadAttention
from whorl.nn.experts import MixtureOfExperts
from whorl.nn.mlp import GATED
from whorl.parallel.layout import Layout
from whorl.parallel.tensor_parallel import FIRST, Shard

WHOLE = Shard(partial=True)
# Of a block's parameters; the others are whole. A gated matrix has two sections, a fused one three.
SPLIT: dict[str, int | str] = {
    r"mixer\.(q|k|v|qkv)\.(weight|bias)": 0,
    r"mixer\.(temperature|sink|smear\.share)": 0,
    r"mixer\.out\.weight": 1,
    r"mixer\.out\.bias": FIRST,
    r"mlp\.(shared\.)?up\.(weight|bias)": 0,
    r"mlp\.(shared\.)?down\.weight": 1,
    r"mlp\.(shared\.)?down\.bias": FIRST,
    r"mlp\.experts\.up\.\d+": 0,
    r"mlp\.experts\.down\.\d+": 1,
}


def tensor_shards(model: LanguageModel) -> dict[str, Shard]:
    """Return how each parameter of a whole model is held on the tensor axis, by name."""
    found = {}
    for name, parameter in model.named_parameters():
        if name in ("embedding", "head"):
            found[name] = Shard(0, padded=True)
        elif not name.startswith("blocks."):  # look-ups run on all positions, the last norm on this rank's
            found[name] = Shard(partial=name.startswith(("final_norm", "embedding_norm")))
        else:
            _, number, own = name.split(".", 2)
            dim = next((d for pattern, d in SPLIT.items() if re.fullmatch(pattern, own)), None)
            sections: tuple[int, ...] = ()
            if own.startswith("mixer.qkv"):
                mixer = model.layer_mixers()[int(number)]
                sections = tuple(
                    n * mixer.head_dim for n in (mixer.n_heads, mixer.n_kv_heads, mixer.n_kv_heads)
                )
            elif ".up." in own and model.config.mlp in GATED:
                sections = (len(parameter) // 2,) * 2
            found[name] = WHOLE if dim is None else Shard(dim, sections)
    return found


def check_layout(model: LanguageModel, layout: Layout, rows: int, length: int) -> None:
    """Check that a layout divides what it splits.

    rows: of a step, over all ranks. length: of a row, in positions.

    Raises:
        ConfigError: a degree that does not divide, with the nearest that do; a mixer that cannot be split, by its name.
    """
    config = model.config
    layout.check_divides(
        "pp", "groups of layers that share keys", config.n_layers // config.kv_sharing_factor
    )
    layout.check_divides("dp x fsdp", "rows of a step", rows)
    layout.check_divides("cp x tp", "positions of a row", length)
    if config.experts is not None:
        layout.check_divides("ep", "experts", config.experts.n_experts)
        layout.check_divides("tp", "hidden units of an expert", config.experts.hidden)
    if layout.fsdp > 1 and config.kv_sharing_factor > 1:
        what = "layers that share keys under fsdp: FSDP2 gives each layer copies of what another appended"
        raise ConfigError(what, expected="dp", do="use dp in place of fsdp")
    if layout.tp == 1:
        return
    blocks: list[Any] = list(model.blocks)
    for number, block in enumerate(blocks):
        mixer, name = block.mixer, f"blocks.{number}.mixer"
        if not isinstance(mixer, MultiHeadAttention) or mixer.norm_all_heads or config.kv_sharing_factor > 1:
            why = " with norms over all heads or shared keys" if isinstance(mixer, MultiHeadAttention) else ""
            raise ConfigError(
                f"{name} ({type(mixer).__name__}{why}) cannot be split over tensor ranks",
                expected="attention by heads",
                do="remove tp from the layout",
            )
        layout.check_divides("tp", f"key heads of {name}", mixer.n_kv_heads)
        hidden = block.mlp.shared if isinstance(block.mlp, MixtureOfExperts) else block.mlp
        if hidden is not None:
            layout.check_divides("tp", f"hidden units of blocks.{number}.mlp", hidden.down.weight.shape[1])
