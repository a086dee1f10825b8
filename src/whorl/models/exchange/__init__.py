"""Models of others in, ours out: folders as `transformers` writes and reads them.

    model = import_model(Path("Qwen3-0.6B"), dtype=torch.bfloat16)
    export_model(model, Path("mine"), "qwen3", source=Path("Qwen3-0.6B"))
    clip = import_vision(Path("clip-vit-base-patch32"))

A family is a file here, or part of one: a table of fields and a table of tensors, both ways. Adding one is its table, and
its name in `FAMILIES`. `files.py` reads and writes shards, `fields.py` refuses what it does not know, `rules.py`
says how a tensor of theirs becomes one of ours, `weights.py` moves them, `family.py` says what most have in common.
`convert.py` puts them together for language models, `vision.py` for ViT and CLIP (`vit.py`, `clip.py`).
"""

from whorl.models.exchange.convert import FAMILIES, export_model, find_family, import_model, read_config
from whorl.models.exchange.families.vision import (
    VISION_FAMILIES,
    export_vision,
    import_vision,
    read_vision_config,
)
from whorl.models.exchange.safetensors_io import Shards

__all__ = [
    "FAMILIES",
    "VISION_FAMILIES",
    "Shards",
    "export_model",
    "export_vision",
    "find_family",
    "import_model",
    "import_vision",
    "read_config",
    "read_vision_config",
]
