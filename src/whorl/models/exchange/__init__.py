"""Models of others in, ours out: folders as `transformers` writes and reads them.

    model = import_model(Path("Qwen3-0.6B"), dtype=torch.bfloat16)
    export_model(model, Path("mine"), "qwen3", source=Path("Qwen3-0.6B"))

A family is a file here, or part of one: a table of fields and a table of tensors, both ways. Adding one is its table, and
its name in `convert.FAMILIES`. `files.py` reads and writes shards, `fields.py` refuses what it does not know, `rules.py`
says how a tensor of theirs becomes one of ours, `family.py` what most have in common; `convert.py` puts them together.
"""

from whorl.models.exchange.convert import FAMILIES, export_model, import_model, read_config
from whorl.models.exchange.files import Shards

__all__ = ["FAMILIES", "Shards", "export_model", "import_model", "read_config"]
