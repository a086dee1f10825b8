"""Benches and studies import names that the package has: most of them do not run in every commit."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each `from whorl... import name` of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("whorl", "bench"):
            yield from ((str(node.module), alias.name) for alias in node.names)


@cache
def names(module: str) -> set[str]:
    """Return the names that a module's text binds at its top level, and its submodules."""
    path = ROOT / ("src" if module.startswith("whorl") else "") / Path(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    found = {p.stem for p in path.glob("*")}
    for node in ast.walk(ast.parse(file.read_text())) if file.exists() else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_each_imported_name_exists():
    files = [path for folder in ("bench", "studies") for path in sorted((ROOT / folder).rglob("*.py"))]
    missing = [
        f"{path.relative_to(ROOT)}: {module} has no {name}"
        for path in files
        for module, name in imports(path)
        if name not in names(module)
    ]
    assert len(files) > 100 and not missing
