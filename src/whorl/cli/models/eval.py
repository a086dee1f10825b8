"""`whorl eval`: evaluate a model on tasks, or compare two."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from whorl.cli.config_options import Configs, config_options
from whorl.cli.options import StoreOption

if TYPE_CHECKING:
    from whorl.evals.kinds.kind import EvalTask
    from whorl.evals.model.options import ModelOptions, SampleSettings


def _configs() -> Configs:
    from whorl.evals.model.options import ModelOptions, SampleSettings

    fields = tuple(name for name in ModelOptions.model_fields if name not in ("store", "name_option"))
    return {"sampling": (SampleSettings, ()), "options": (ModelOptions, fields)}


@config_options(_configs)
def eval(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An artifact (model or evaluation), a folder of a model or of results, the URL of an API, or a system.",
        ),
    ] = "",
    *,
    suite: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE", help="A suite: a name that --list shows, or a TOML file."),
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE",
            help="A task: a ready one, arithmetic-LEVEL, a TOML or YAML file, or a JSONL file of verifiable tasks.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH|TASK=PATH", help="Records of a task; replaces those of its file."),
    ] = None,
    train: Annotated[
        list[str] | None, typer.Option(metavar="PATH|TASK=PATH", help="Records for few-shot examples.")
    ] = None,
    against: Annotated[
        str, typer.Option(metavar="MODEL", help="Compare with this model on the same items.")
    ] = "",
    against_name: Annotated[
        str, typer.Option(help="With a URL for --against: its model; default: --model-name.")
    ] = "",
    margin: Annotated[
        float, typer.Option(min=0, help="Difference that does not matter, for --against.")
    ] = 0.0,
    corpus: Annotated[
        str,
        typer.Option(
            metavar="ARTIFACT", help="Corpus of the suite own; default: that of the model's lineage."
        ),
    ] = "",
    sampling: SampleSettings,
    limit: Annotated[int | None, typer.Option(min=1, help="Items per task, the first ones.")] = None,
    options: ModelOptions,
    judge: Annotated[str, typer.Option(metavar="MODEL", help="The judge of tasks that have one.")] = "",
    judge_name: Annotated[str, typer.Option(help="With a URL: the judge's model.")] = "",
    cache: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Responses; default: responses.sqlite in the store.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of results and page.")] = Path(
        "evaluation"
    ),
    contamination: Annotated[
        bool, typer.Option("--contamination", help="Search the items in the model's training tokens.")
    ] = False,
    all_metrics: Annotated[bool, typer.Option("--all", help="Print all metrics of each task.")] = False,
    list_: Annotated[
        bool, typer.Option("--list", help="List the ready tasks, and suites with their sizes.")
    ] = False,
    store: StoreOption = None,
) -> None:
    """Evaluate a model on tasks, or compare two models on the same items.

    Responses are stored: another metric, or a run after an interruption, requests only what is missing. A figure has a 95 %
    interval over items, the value of random answers, and the hash of its task; figures with equal hashes compare.

    Examples:

        whorl eval quickstart/pretrain --task lambada --data lambada.jsonl

        whorl eval quickstart/sft --task arc --data ARC-Challenge-Test.jsonl --against quickstart/pretrain

        whorl eval chat/sft --task gsm8k --data gsm8k_test.jsonl --train gsm8k_train.jsonl --num-fewshot 5

        whorl eval quickstart/sft --task arithmetic-5 --samples 1,2,4 --budgets 8,16,32

        whorl eval http://127.0.0.1:8000/v1 --model-name my-model --task gsm8k --data gsm8k_test.jsonl
    """
    from whorl.cli.models.eval_output import print_list, print_results
    from whorl.cli.models.eval_samples import reward_role
    from whorl.cli.models.eval_tasks import (
        check_output,
        evaluate_model,
        load_tasks,
        results_folder,
        without_scores,
    )
    from whorl.errors import ConfigError
    from whorl.evals.comparisons import compare_results, summary_sentence, unshared_sentence
    from whorl.evals.model.open_model import check_model
    from whorl.evals.model.options import ModelOptions
    from whorl.evals.results_io import load_results
    from whorl.evals.suites import SuiteInputs
    from whorl.evals.suites.held_out import held_out_documents
    from whorl.report.evaluation import write_page
    from whorl.store import Store

    if list_:
        corpus_of = corpus or model
        held_out = partial(held_out_documents, Store(store), corpus_of) if corpus_of else tuple
        print_list(SuiteInputs(held_out, limit, sampling.seed, run_programs=False))
        return
    if not model:
        raise ConfigError(
            "no model is given", expected="an artifact, a folder or a URL", do="whorl eval MODEL --task NAME"
        )
    options = options.model_copy(update={"store": store})
    judge_options = ModelOptions(
        model_name=judge_name, store=store, name_option="--judge-name", timeout=options.timeout,
        concurrency=options.concurrency,
    )  # fmt: skip
    against_options = options.model_copy(
        update={"model_name": against_name or options.model_name, "name_option": "--against-name"}
    )
    check_output(out)
    for ref, own in ((model, options), (against, against_options)):  # before the work on the first one
        if ref and results_folder(ref, store) is None:
            check_model(ref, own)
    cache_path = cache or Store(store).root / "responses.sqlite"
    roles = reward_role(sampling, store)
    documents = partial(held_out_documents, Store(store), corpus or model)
    tasks: list[EvalTask] = []
    folders, found, labels = [], [], []
    for ref, label, own in ((model, "a", options), (against, "b", against_options)):
        if not ref:
            continue
        if (folder := results_folder(ref, store)) is not None:
            folders.append(folder)
            found.append(load_results(folder))
        else:
            if not tasks:
                tasks = load_tasks(
                    suite, task, data, train, limit=limit, documents=documents, sampling=sampling
                )
            folders.append(out / label if against else out)
            found.append(
                evaluate_model(ref, own, tasks, cache_path, folders[-1], (judge, judge_options),
                               roles=roles, contamination=contamination)
            )  # fmt: skip
        if folder is not None and (suite or task):
            print(f"{ref} has earlier results, so --suite and --task do not apply to it", file=sys.stderr)
        labels.append(found[-1][0].model if found[-1] else ref)
        if against:
            print(f"{label.upper()}: {labels[-1]}")
        print_results(found[-1], all_metrics=all_metrics)
    verdicts: list[str] = []
    unscored = without_scores(labels, found)
    if against and unscored is None:
        pair = (labels[0], labels[1]) if labels[0] != labels[1] else ("A", "B")
        compared = compare_results(found[0], found[1], pair, margin=margin)
        summary = [summary_sentence(compared, pair)] if len(compared) > 1 else []
        verdicts = [*summary, *(each.text for each in compared)]
        if alone := unshared_sentence(found[0], found[1], pair):
            verdicts.append(alone)
        print("\n".join(verdicts))
    out.mkdir(parents=True, exist_ok=True)
    print(f"wrote {write_page(folders, out / 'page.html', verdicts=verdicts)}: open it in a browser")
    if unscored is not None:
        raise unscored
