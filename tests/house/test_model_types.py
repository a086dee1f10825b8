"""No code outside of `models/` branches on the class of a model or of its configuration: models have methods for that."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "whorl"


def type_checks(path: Path) -> Iterator[str]:
    """Yield "file:line" of each `isinstance`, `issubclass` or class pattern with a class imported from `whorl.models`."""
    tree = ast.parse(path.read_text("utf-8"))
    classes, modules = set[str](), {"whorl.models"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == ["whorl", "models"]:
            classes |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "whorl":
            modules |= {name.asname or name.name for name in node.names if name.name == "models"}
        elif isinstance(node, ast.Import):
            found = [name for name in node.names if name.name.split(".")[:2] == ["whorl", "models"]]
            modules |= {name.asname for name in found if name.asname}
    checked: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id in ("isinstance", "issubclass") and len(node.args) == 2:
                checked.append(node.args[1])
        elif isinstance(node, ast.MatchClass):
            checked.append(node.cls)
    for expression in checked:
        parts = list(ast.walk(expression))
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        prefixes = {ast.unparse(part.value) for part in parts if isinstance(part, ast.Attribute)}
        if names & classes or any(p in modules or p.startswith("whorl.models.") for p in prefixes):
            yield f"{path.name}:{expression.lineno}"


def test_no_type_checks_on_models_outside_models() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "models"]
    found = [f"{path.relative_to(PACKAGE).parent}/{where}" for path in files for where in type_checks(path)]
    assert len(files) > 300 and not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "from whorl.models import Transformer as D\nisinstance(m, int | D)",
        "from whorl.models.transformer_config import AttentionConfig\nisinstance(m, (int, AttentionConfig))",
        "def f(c):\n    from whorl.models import TransformerConfig\n    issubclass(c, TransformerConfig)",
        "import whorl.models.transformer\nisinstance(m, whorl.models.transformer.Transformer)",
        "from whorl import models\nisinstance(m, models.Transformer)",
        "from whorl.models import Transformer\nmatch m:\n    case Transformer():\n        pass",
    ],
)
def test_type_check_is_found(code: str, tmp_path: Path) -> None:
    path = tmp_path / "room.py"
    path.write_text(code)
    assert len(list(type_checks(path))) == 1
    path.write_text(code.replace("whorl", "other"))
    assert not list(type_checks(path))
