"""Read a task of lm-evaluation-harness 0.4 (YAML) whose data lie in local files.

    task: arc_local                          output_type             kind
    dataset_path: json                       multiple_choice         choice
    dataset_kwargs:                          loglikelihood           likelihood with a continuation
      data_files: {test: arc.jsonl}          loglikelihood_rolling   likelihood
    output_type: multiple_choice             generate_until          generate
    doc_to_text: "{{question}}"

A key that changes a score and has no counterpart here is an error that names it: a figure must not differ in silence.
Python functions (`!function`) and `include` are such keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whorl.errors import ConfigError, one_of
from whorl.evals.tasks.config import TaskConfig, absolute, generation_settings, parse_task
from whorl.registry import require_extra

WITHOUT_EFFECT = {  # on a score
    "task", "task_alias", "tag", "group", "metadata", "metric_list", "should_decontaminate",
    "doc_to_decontamination_query", "dataset_name",
}  # fmt: skip
KEYS = WITHOUT_EFFECT | {
    "dataset_path", "dataset_kwargs", "output_type", "training_split", "validation_split", "test_split", "fewshot_split",
    "doc_to_text", "doc_to_target", "doc_to_choice", "num_fewshot", "fewshot_config", "target_delimiter",
    "fewshot_delimiter", "description", "generation_kwargs", "repeats", "filter_list",
}  # fmt: skip
EXAMPLE_SPLITS = ("fewshot_split", "training_split", "validation_split")  # the first that is set
MAX_WINDOW = 1 << 30  # reduced to the model's length
MAPPINGS = ("dataset_kwargs", "fewshot_config", "generation_kwargs", "metadata")
LISTS = ("metric_list", "filter_list")  # of mappings
NUMBERS = ("num_fewshot", "repeats")
SAMPLERS = ("default", "first_n")
KINDS = {
    "multiple_choice": "choice",
    "loglikelihood": "likelihood",
    "loglikelihood_rolling": "likelihood",
    "generate_until": "generate",
}
METRICS = {
    "choice": {"acc": "acc", "acc_norm": "acc_norm", "acc_bytes": "acc_bytes", "acc_mutual_info": "acc_mutual_info",
               "brier_score": "brier"},
    "likelihood": {"acc": "acc", "perplexity": "item_perplexity", "word_perplexity": "word_perplexity",
                   "byte_perplexity": "byte_perplexity", "bits_per_byte": "bits_per_byte"},
    "generate": {"exact_match": "exact_strict"},
}  # fmt: skip


def read_harness_file(path: Path) -> TaskConfig:
    """Return the configuration of a YAML file.

    Raises:
        ConfigError: it cannot be read, or has a key without counterpart; the message names it.
    """
    require_extra(f"the task file {path}", "yaml", "serve")
    import yaml

    try:
        content = yaml.load(path.read_text("utf-8"), _loader())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path} cannot be read: {reason}", expected="a YAML file of a task") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds {type(content).__name__}", expected="the keys of a task")
    for key, value in content.items():
        if key not in KEYS or isinstance(value, _Function):
            function = f" as the Python function {value.name!r}" if isinstance(value, _Function) else ""
            raise ConfigError(
                f"{path}: the key {key!r}{function} has no counterpart", expected=f"keys: {', '.join(sorted(KEYS))}",
                do="write the task as TOML (docs/evals.md), or convert the records before",
            )  # fmt: skip
    _check_types(path, content)
    return _convert(path, content)


def _check_types(path: Path, content: Mapping[str, Any]) -> None:
    """Raises ConfigError: a value has another type than its key needs. An absent or empty value is right."""

    def require(ok: bool, key: str, value: Any, expected: str) -> None:
        if not ok:
            raise ConfigError(f"{path}: {key} is {value!r}", expected=expected, do="correct the task file")

    for key in MAPPINGS:
        require(isinstance(content.get(key) or {}, Mapping), key, content.get(key), "a mapping")
    for key in LISTS:
        entries = content.get(key) or []
        ok = isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries)
        require(ok, key, entries, "a list of mappings, such as - metric: acc")
    for each in content.get("filter_list") or []:
        steps = each.get("filter") or []
        ok = isinstance(steps, list) and all(isinstance(step, Mapping) for step in steps)
        require(ok, "filter_list", [each], "entries with a list of mappings as filter")
    for key in NUMBERS:
        value = content.get(key) or 0
        require(isinstance(value, int) and value >= 0, key, value, "a whole number, at least 0")
    settings = content.get("generation_kwargs") or {}
    for key, kinds in (("temperature", (int, float)), ("top_p", (int, float)), ("max_gen_toks", int)):
        value = settings.get(key, 0)
        ok = isinstance(value, kinds) and not isinstance(value, bool)
        require(ok, f"generation_kwargs.{key}", value, "a number")
    until = settings.get("until", "")
    ok = isinstance(until, str) or (isinstance(until, list) and all(isinstance(text, str) for text in until))
    require(ok, "generation_kwargs.until", until, "a text, or a list of texts")


class _Function:
    """A value `!function module.name`."""

    def __init__(self, name: str) -> None:
        self.name = name


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    Loader.add_constructor("!function", lambda loader, node: _Function(str(node.value)))
    return Loader


def _convert(path: Path, content: Mapping[str, Any]) -> TaskConfig:
    def wrong(key: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{path}: {key} is {content.get(key)!r}", expected=expected, do="write the task as TOML"
        )

    output = str(content.get("output_type", "generate_until"))
    if output not in KINDS:
        raise wrong("output_type", ", ".join(KINDS))
    if content.get("dataset_path") not in ("json", "parquet"):
        raise wrong("dataset_path", "json or parquet, with local files in dataset_kwargs.data_files")
    files = (content.get("dataset_kwargs") or {}).get("data_files")
    splits = dict(files) if isinstance(files, Mapping) else {"train": files} if files else {}
    test = (
        content.get("test_split")
        or content.get("validation_split")
        or ("test" if "test" in splits else "train")
    )
    if test not in splits:
        raise wrong("dataset_kwargs", f"data_files with the split {test!r}")
    if int(content.get("repeats", 1)) != 1:
        raise wrong("repeats", "1")
    kind = KINDS[output]
    text = "doc_to_target" if output == "loglikelihood_rolling" else "doc_to_text"
    fields: dict[str, Any] = {
        "name": str(content.get("task") or path.stem), "kind": kind, "version": _version(content),
        "template": _template(path, content, text), "system": str(content.get("description", "")),
        "separator": str(content.get("fewshot_delimiter", "\n\n")), "system_end": "", "data": {"test": splits[test]},
        "num_fewshot": int(content.get("num_fewshot") or 0),
    }  # fmt: skip
    given = content.get("fewshot_config") or {}
    fields["fewshot_sampler"] = given.get("sampler", "default")
    if not {*given} <= {"sampler"} or fields["fewshot_sampler"] not in SAMPLERS:
        raise wrong("fewshot_config", f"the key sampler alone: {one_of(str(given.get('sampler')), SAMPLERS)}")
    examples = next((content[key] for key in EXAMPLE_SPLITS if content.get(key)), "")
    if examples and examples not in splits and fields["num_fewshot"]:
        raise wrong("dataset_kwargs", f"data_files with the few-shot split {examples!r}")
    fields["data"]["train"] = splits.get(examples, ())
    _add_kind(path, content, output, fields)
    fields["metrics"] = _metrics(path, content, kind)
    config = parse_task(fields, str(path))
    return config.model_copy(update={"data": absolute(config.data, path.parent)})


def _add_kind(path: Path, content: Mapping[str, Any], output: str, fields: dict[str, Any]) -> None:
    delimiter = str(content.get("target_delimiter", " "))
    target, strips = content.get("doc_to_target"), _strips(path, content)
    if output == "multiple_choice":
        choices = content.get("doc_to_choice")
        if isinstance(choices, str):
            inner = choices.strip()
            fields["choices"] = (
                inner.removeprefix("{{").removesuffix("}}").strip() if inner.startswith("{{") else inner
            )
        elif isinstance(choices, list):
            fields["choices"] = [str(choice) for choice in choices]
        else:
            raise ConfigError(
                f"{path}: doc_to_choice is {choices!r}", expected="an expression, or a list of texts"
            )
        fields["gold"] = _expression(target)
        metrics = [entry.get("metric") for entry in content.get("metric_list") or []]
        fields["options"] = {"delimiter": delimiter, "prior": "acc_mutual_info" in metrics}
    elif output == "loglikelihood":
        target = _template(path, content, "doc_to_target")
        fields["options"] = {"continuation": target}  # the harness puts the delimiter into examples only
        fields["example_answer"] = delimiter + target
    elif output == "loglikelihood_rolling":  # windows of the model's length that do not overlap
        fields["options"] = {"window": MAX_WINDOW, "stride": MAX_WINDOW, "score_bos": True}
    elif output == "generate_until":
        settings = {"until": fields["separator"], **(content.get("generation_kwargs") or {})}
        if not settings.get("do_sample"):
            settings.pop("temperature", None)  # the harness ignores it
        fields["generation"] = generation_settings(settings, f"{path}: generation_kwargs")
        fields["gold"] = _expression(target)
        fields["example_answer"] = delimiter + _template(path, content, "doc_to_target")
        form = "bare" if strips else "verbatim"
        fields["options"] = {"metric": "exact", "metric_options": {"form": form}}


def _strips(path: Path, content: Mapping[str, Any]) -> bool:
    """Return whether white space around an answer is removed, by the only filter that has a counterpart."""
    filters = content.get("filter_list") or [{"filter": [{"function": "take_first"}]}]
    names = [step.get("function") for each in filters for step in each.get("filter") or []]
    steps = [step for each in filters for step in each.get("filter") or []]
    if (
        len(filters) > 1
        or not {*names} <= {"remove_whitespace", "take_first"}
        or any(len(s) > 1 for s in steps)
    ):
        raise ConfigError(
            f"{path}: filter_list is {filters!r}", expected="one filter of remove_whitespace and take_first",
            do="write the task as TOML, with a metric's form or a pattern (docs/evals/metrics.md)",
        )  # fmt: skip
    return "remove_whitespace" in names


def _template(path: Path, content: Mapping[str, Any], key: str) -> str:
    """Return a template; a name alone is a field of the record."""
    value = content.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{path}: {key} is {value!r}", expected="a template, or the name of a field")
    return f"{{{{ {value} }}}}" if value.isidentifier() else value


def _expression(value: Any) -> str:
    text = str(value).strip()
    whole = text.startswith("{{") and text.endswith("}}") and text.count("{{") == 1
    return text[2:-2].strip() if whole else text


def _version(content: Mapping[str, Any]) -> str:
    return str((content.get("metadata") or {}).get("version", "1"))


def _metrics(path: Path, content: Mapping[str, Any], kind: str) -> list[str]:
    found = []
    for entry in content.get("metric_list") or []:
        name = str(entry.get("metric"))
        for key in entry:
            if key not in ("metric", "aggregation", "higher_is_better"):
                raise ConfigError(
                    f"{path}: metric_list, {name}: the key {key!r} has no counterpart",
                    expected="metric, aggregation, higher_is_better", do="write the task as TOML",
                )  # fmt: skip
        if name not in METRICS[kind]:
            raise ConfigError(
                f"{path}: metric_list has the metric {name!r}, which has no counterpart",
                expected=", ".join(METRICS[kind]),
            )  # fmt: skip
        found.append(METRICS[kind][name])
    return found
