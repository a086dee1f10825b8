"""`constraints.txt` pins every package that an installation for the tests takes, so that a new release changes nothing."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]


def needed(requirements: Iterable[str]) -> Iterator[Requirement]:
    """The requirements, and those of the installed packages that they name, of all depths."""
    todo, seen = [(Requirement(text), ("",)) for text in requirements], set()
    while todo:
        requirement, extras = todo.pop()
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        yield requirement
        own = ("", *sorted(requirement.extras))
        if (key := (canonicalize_name(requirement.name), own)) not in seen:
            seen.add(key)
            todo += [(Requirement(text), own) for text in distribution(requirement.name).requires or ()]


def test_every_dependency_is_pinned_to_one_version() -> None:
    assert [line for line in LINES if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    pins = {canonicalize_name(line.partition("==")[0]): line.partition("==")[2] for line in LINES}
    assert len(pins) == len(LINES)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in needed([*project["dependencies"], *extras["serve"], *extras["dev"]]):
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt"
        assert requirement.specifier.contains(pin, prereleases=True), f"{requirement} excludes {pin}"
