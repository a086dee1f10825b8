"""Recipes: a short TOML text of named steps, checked as a whole before any work.

    name = "quickstart"
    about = "one line for `whorl recipes`"

    [steps.ingest]                  # a step; `uses` is its own name unless given
    sources = ["python-stdlib"]     # the step's configuration

    [steps.curate]
    parents = ["ingest"]            # by kind; or by role: parents = {documents = "ingest"}

    [steps.sft]
    from = "quickstart/pretrain"    # a model that exists (`given_models.py`)

A mistake raises ConfigError with file, line, the value found and the value expected. For an unknown key or step the error
gives the nearest known one. Parents, cycles and values are checked too.
`--set step.field=value` replaces one value and is checked in the same way. A table [kernels], or `--set kernels.NAME=WAY`,
forces choices of kernels in all steps (`machine/kernel_choice.py`). `code = ["my_rewards:length"]` names functions and
classes that records and model folders may use, in addition to those that the steps name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from whorl.errors import DOCS_URL, ConfigError, one_of, shorten
from whorl.machine.budget import budget_ratio, shrink_sizes
from whorl.machine.kernel_choice import check_forced
from whorl.recipes.config_errors import parse_flag_value, validated_config
from whorl.recipes.given_models import FROM, check_given, give_model, import_folders
from whorl.recipes.registry import ANY_ROLE, StepKind, step_kinds
from whorl.recipes.toml_lines import key_lines, line_of, read_recipe_text
from whorl.registry import code_named_in, permit_code

MAX_CHAIN = 200  # steps in a chain of parents; the lineage nests as deep
STEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True)
class RecipeStep:
    """One validated step; `parents` maps role -> name of the step that makes it."""

    name: str
    kind: StepKind
    parents: Mapping[str, str]
    config: BaseModel


@dataclass(frozen=True)
class Recipe:
    """A validated recipe; its steps are in topological order, parents first.

    log: metric sinks with their settings. kernels: forced choices. code: what data may name (`whorl.registry`). None of
        them is part of any address.
    shrunk: sizes that a `--budget` below the recipe's has lowered, as "step.field": value.
    changed: options that have changed a setting.
    given_name: of the run, by `--name`.
    """

    name: str
    about: str
    steps: Mapping[str, RecipeStep]
    log: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    shrunk: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, str] = field(default_factory=dict)
    code: Sequence[str] = ()
    changed: Sequence[str] = ()
    given_name: str = ""

    @property
    def run_name(self) -> str:
        return self.given_name or self.name

    def permit_code(self) -> None:
        """Permit the data of this run to name the code that the recipe names."""
        permit_code(*self.code)

    def to_json(self) -> dict[str, Any]:
        """Return the resolved recipe with every value, defaults included."""
        steps = {
            step.name: {
                "uses": step.kind.name,
                "parents": dict(step.parents),
                **step.config.model_dump(mode="json"),
            }
            for step in self.steps.values()
        }
        return {"name": self.name, "about": self.about, "steps": steps}

    def with_ancestors(self, *names: str) -> Recipe:
        """Return the recipe reduced to some steps and their ancestors. Raises ConfigError for an unknown step."""
        for name in names:
            if name not in self.steps:
                raise ConfigError(f"--until {name}: no such step", expected=one_of(name, list(self.steps)))
        needed, pending = set[str](), [*names]
        while pending:
            step = pending.pop()
            needed.add(step)
            pending += [parent for parent in self.steps[step].parents.values() if parent in self.steps]
        kept = {key: step for key, step in self.steps.items() if key in needed}
        return replace(self, steps=kept)

    def dependants(self, name: str) -> list[str]:
        """Return the steps that cannot be made without the result of a step, in their order."""
        found = [name]
        for step in self.steps.values():
            roles = step.kind.parent_roles()
            needed = [p for role, p in step.parents.items() if role in roles and not roles[role][1]]
            if any(parent in found for parent in needed):
                found.append(step.name)
        return found[1:]


def load_recipe(
    name: str,
    *,
    sets: Iterable[str] = (),
    budget: str | None = None,
    deterministic: bool = False,
    model: str = "",
) -> Recipe:
    """Read and validate a recipe with `--from`, `--set`, `--budget` and `--deterministic` applied. Raises ConfigError."""
    text, source_name = read_recipe_text(name)
    return parse_recipe(text, source_name, sets=sets, budget=budget, deterministic=deterministic, model=model)


def parse_recipe(
    text: str,
    source_name: str,
    *,
    sets: Iterable[str] = (),
    budget: str | None = None,
    deterministic: bool = False,
    model: str = "",
    kinds: Mapping[str, StepKind] | None = None,
) -> Recipe:
    """Validate the text of a recipe; `source_name` is the file name in error messages. Raises ConfigError.

    model: to start from (`given_models.py`).
    """
    try:
        data = tomllib.loads(text.removeprefix("\ufeff"))  # a byte-order mark
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source_name}: not TOML: {error}", expected=f"a recipe in TOML; see {DOCS_URL}/recipes.md"
        ) from error
    parser = _RecipeParser(text, source_name, kinds if kinds is not None else step_kinds())
    return parser.parse(data, sets, budget, deterministic, model)


class _RecipeParser:
    """Validates one recipe and finds the line of each key for error messages."""

    def __init__(self, text: str, source_name: str, kinds: Mapping[str, StepKind]) -> None:
        self.lines, self.source_name, self.kinds = key_lines(text), source_name, kinds
        self.flag_of_key: dict[tuple[str, ...], str] = {}  # key path -> command-line flag that set it

    def location(self, *path: str) -> str:
        """Return the flag that set a key, or its file and line."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.flag_of_key:
                return self.flag_of_key[path[:length]]
        return f"{self.source_name}:{line_of(self.lines, *path)}"

    def parse(
        self, data: dict[str, Any], sets: Iterable[str], budget: str | None, deterministic: bool, model: str
    ) -> Recipe:
        for key in data:
            if key not in (keys := ("name", "about", "steps", "log", "kernels", "code")):
                raise ConfigError(f"{self.location(key)}: unknown key {key!r}", expected=one_of(key, keys))
        tables = data.get("steps")
        if not isinstance(tables, dict) or not tables:
            raise ConfigError(
                f"{self.location('steps')}: the recipe has no steps", expected="a table [steps.NAME] for each"
            )
        name = data.get("name", Path(self.source_name).stem)
        if not isinstance(name, str) or not STEP_NAME.fullmatch(name):
            raise ConfigError(
                f"{self.location('name')}: the recipe cannot be called {shorten(repr(name))}",
                expected="letters, digits, _ and -, at most 100",
            )
        if model:
            give_model(tables, {step: self.kind_of(step, table) for step, table in tables.items()}, model)
        tables = import_folders(tables)
        kinds = {step: self.kind_of(step, table) for step, table in tables.items()}
        shrunk_sizes: dict[str, float] = {}
        if budget is not None:
            ratio = min([1.0, *(budget_ratio(budget, kinds[s].config, tables[s]) for s in tables)])
            self.apply_to_all(tables, kinds, "budget", budget, f"--budget {budget}", "a budget")
            for step, table in tables.items():
                lowered = shrink_sizes(kinds[step].config, table, ratio)
                shrunk_sizes |= {f"{step}.{name}": value for name, value in lowered.items()}
        if deterministic:
            self.apply_to_all(tables, kinds, "deterministic", True, "--deterministic", "that setting")
        kernels = data.get("kernels", {})
        if not isinstance(kernels, dict):
            raise ConfigError(f"{self.location('kernels')}: kernels is not a table", expected="[kernels]")
        for text in sets:
            if text.startswith("kernels.") and "kernels" not in tables:
                key, _, way = (part.strip() for part in text.removeprefix("kernels.").partition("="))
                kernels[key] = way
                self.flag_of_key["kernels", key] = f"--set {text}"
            else:
                self.apply_set(tables, kinds, text)
        for key, way in kernels.items():
            check_forced(self.location("kernels", key), key, way)
        parents = {step: self.parents_of(step, tables, kinds) for step in tables}
        steps = {
            step: RecipeStep(
                step, kinds[step], parents[step], self.config_of(step, tables[step], kinds[step])
            )
            for step in self.topological_order(
                {step: {r: p for r, p in own.items() if p in tables} for step, own in parents.items()}
            )
        }
        log = data.get("log", {})
        if not isinstance(log, dict) or not all(isinstance(table, dict) for table in log.values()):
            raise ConfigError(f"{self.location('log')}: log is not a table of tables", expected="[log.wandb]")
        code = data.get("code", [])
        if not isinstance(code, list) or list(code_named_in(code)) != code:
            raise ConfigError(f"{self.location('code')}: code is {code!r}", expected='["module:attribute"]')
        code = [*code, *code_named_in(tables)]
        about, base = str(data.get("about", "")), [f"--from {model}"] if model else []
        changed = [*base, *dict.fromkeys(self.flag_of_key.values())]
        return Recipe(name, about, steps, log, shrunk_sizes, kernels, code, changed)

    def kind_of(self, step: str, table: Any) -> StepKind:
        location = self.location("steps", step)
        if not STEP_NAME.fullmatch(step):
            raise ConfigError(
                f"{location}: a step cannot be called {shorten(repr(step))}",
                expected="letters, digits, _ and -, at most 100",
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{location}: the step {step} is not a table", expected=f"[steps.{step}]")
        uses = table.get("uses", step)
        if not isinstance(uses, str) or uses not in self.kinds:
            raise ConfigError(
                f"{self.location('steps', step, 'uses')}: unknown step {uses!r}",
                expected=one_of(str(uses), sorted(self.kinds)),
                do="if the name is your own, add uses = ..." if uses == step else "",
            )
        return self.kinds[uses]

    def parents_of(self, step: str, tables: dict[str, Any], kinds: dict[str, StepKind]) -> dict[str, str]:
        """Return role -> step. In a list, the kind of a parent decides its role."""
        location, given, kind = (
            self.location("steps", step, "parents"),
            tables[step].get("parents", []),
            kinds[step],
        )
        roles = kind.parent_roles()
        named = isinstance(given, dict)
        values = list(given.values()) if named else given
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ConfigError(
                f"{location}: the parents of {step} are neither a list nor a table of steps",
                expected='parents = ["ingest"] or parents = {documents = "ingest"}',
            )
        for parent in values:
            if parent not in tables:
                raise ConfigError(
                    f"{location}: the parent {parent!r} of {step} is not a step of this recipe",
                    expected=one_of(parent, [other for other in tables if other != step]),
                )
        if ANY_ROLE in roles:
            return dict(given) if named else {parent: parent for parent in values}
        found: dict[str, str] = {}
        for role, parent in given.items() if named else ((None, parent) for parent in values):
            kind_made = kinds[parent].output_kind
            fitting = [r for r, (wanted, _) in roles.items() if wanted == kind_made and r not in found]
            if (role is None and not fitting) or (role in roles and roles[role][0] != kind_made):
                wanted = ", ".join(f"{r} ({kind})" for r, (kind, _) in roles.items()) or "no parents"
                raise ConfigError(
                    f"{location}: {step} cannot use {parent}, which makes {kind_made!r}",
                    expected=f"for {kind.name}: {wanted}",
                )
            if role is not None and role not in roles:
                raise ConfigError(
                    f"{location}: {step} has no parent role {role!r}", expected=one_of(role, list(roles))
                )
            found[role if role is not None else fitting[0]] = parent
        if FROM in tables[step]:
            found |= check_given(tables[step][FROM], self.location("steps", step, FROM), kind)
        for role, (wanted, optional) in roles.items():
            if role not in found and not optional:
                makers = [other for other in tables if kinds[other].output_kind == wanted]
                raise ConfigError(
                    f"{location}: {step} has no parent in the role {role!r}",
                    expected=f"a step that makes {wanted!r}" + (f": {', '.join(makers)}" if makers else ""),
                )
        return found

    def topological_order(self, parents: dict[str, dict[str, str]]) -> list[str]:
        """Return the steps with parents first, otherwise in the order of the text.

        Raises:
            ConfigError: a cycle, or a chain of more than MAX_CHAIN steps.
        """
        done: dict[str, int] = {}  # step -> length of its longest chain
        for first in parents:
            path: dict[str, Iterator[str]] = {
                first: iter(parents[first].values())
            }  # step -> parents to visit
            while path:  # not a recursion: a chain of steps may be longer than Python's stack
                step, pending = next(reversed(path.items()))
                parent = next((p for p in pending if p not in done), None)
                if parent is None:
                    done[step] = 1 + max((done[p] for p in parents[step].values()), default=0)
                    if done[step] > MAX_CHAIN:
                        raise ConfigError(
                            f"{self.location('steps', step, 'parents')}: {step} ends a chain of {done[step]} steps",
                            expected=f"at most {MAX_CHAIN} steps in a chain of parents",
                        )
                    del path[step]
                elif parent in path:
                    steps = [*path]
                    cycle = " -> ".join((*steps[steps.index(parent) :], parent))
                    raise ConfigError(
                        f"{self.location('steps', parent, 'parents')}: the parents form a cycle: {cycle}",
                        expected="parents that do not depend on the step itself",
                    )
                else:
                    path[parent] = iter(parents[parent].values())
        return list(done)

    def config_of(self, step: str, table: dict[str, Any], kind: StepKind) -> BaseModel:
        values = {key: value for key, value in table.items() if key not in ("uses", "parents", FROM)}
        flags = [flag for key, flag in self.flag_of_key.items() if key[:2] == ("steps", step)]
        return validated_config(
            kind.config, step, values, lambda *path: self.location("steps", step, *path), flags
        )

    def apply_to_all(
        self,
        tables: dict[str, Any],
        kinds: dict[str, StepKind],
        field: str,
        value: Any,
        flag: str,
        description: str,
    ) -> None:
        """Set a field in every step that has it, itself or in its `train` (`--budget`, `--deterministic`)."""
        found = False
        for step, kind in kinds.items():
            fields = kind.config.model_fields
            train: Any = fields["train"].annotation if "train" in fields else None
            if field in fields:
                tables[step][field] = value
                self.flag_of_key["steps", step, field] = flag
            elif field in getattr(train, "model_fields", {}):
                inner = tables[step].setdefault("train", {})
                if isinstance(inner, dict):  # else the step's settings are refused below
                    inner[field] = value
                self.flag_of_key["steps", step, "train", field] = flag
            else:
                continue
            found = True
        if not found:
            raise ConfigError(f"{flag}: no step of this recipe takes {description}")

    def apply_set(self, tables: dict[str, Any], kinds: dict[str, StepKind], text: str) -> None:
        """Apply `--set step.field=value`; deeper fields have more dots."""
        key, equals, value = text.partition("=")
        step, _, rest = key.strip().partition(".")
        path = rest.split(".")
        if not equals or not rest or not all(path):
            raise ConfigError(f"--set {text}: not a setting", expected="--set step.field=value")
        if step not in tables:
            raise ConfigError(f"--set {text}: no step {step!r}", expected=one_of(step, list(tables)))
        fields = kinds[step].config.model_fields
        if path[0] not in fields:
            raise ConfigError(
                f"--set {text}: the step {step} has no setting {path[0]!r}",
                expected=one_of(path[0], list(fields)),
            )
        table = tables[step]
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise ConfigError(f"--set {text}: {part!r} is not a table")
        table[path[-1]] = parse_flag_value(value, fields[path[0]].annotation if len(path) == 1 else None)
        self.flag_of_key["steps", step, *path] = f"--set {text}"
