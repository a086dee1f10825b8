"""Import and export of models in the formats of Hugging Face `transformers` and GGUF.

    model = import_model(Path("Qwen3-0.6B"), dtype=torch.bfloat16)
    export_model(model, Path("mine"), "qwen3", source=Path("Qwen3-0.6B"))
    clip = import_vision(Path("clip-vit-base-patch32"))

A family is a file in `families/`, or part of one: a table of fields and a table of tensors, for both directions. Adding a
family means adding its table and its name in `LANGUAGE_FAMILIES`.

safetensors_io.py   reads and writes weight files
fields.py           reads config.json and rejects unsupported fields
rules.py            conversions between tensors of a family and of Whorl
weights.py          applies the rules to whole models
family.py           common parts of families
convert.py          language models; families/vision.py: ViT and CLIP
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
