"""Options of `whorl eval` that sample each item several times, and tasks that need no task file."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from whorl.align.data.arithmetic import Arithmetic
from whorl.align.preference.reward_model import load_reward_model
from whorl.cli.options import open_artifact
from whorl.data.quarantine import Quarantine
from whorl.errors import ConfigError, settings_error
from whorl.evals.grading import read_tasks
from whorl.evals.kinds.generate import verifiable_task
from whorl.evals.kinds.kind import EvalTask
from whorl.evals.model.options import SampleSettings
from whorl.evals.model.requests import GenerateRequest, ModelBackend, Request, Response, Score
from whorl.evals.tasks.config import GenerationConfig, generation_settings
from whorl.evals.tasks.task import task_hash
from whorl.machine.device_probe import probe
from whorl.store import user_path
from whorl.tokens.token_encoder import TokenEncoder, concat

N_PROBLEMS = 100


def with_samples(task: EvalTask, sampling: SampleSettings) -> EvalTask:
    """Return the task with the given options, and another hash. Raises ConfigError: its kind has no samples."""
    generation = task.config.generation.model_dump()
    given = generation_settings(sampling.gen_kwargs, "--gen-kwargs")
    generation |= given
    options = dict(task.config.options)
    if sampling.samples or sampling.budgets:
        ks = _numbers("--samples", sampling.samples) or (1,)
        if len(ks) == 1:
            ks = (*(1 << i for i in range(ks[0].bit_length()) if 1 << i < ks[0]), ks[0])
        generation |= {"samples": ks[-1], "seed": given.get("seed", sampling.seed)}
        if "temperature" not in given and not generation["temperature"]:
            generation["temperature"] = 1.0
        options |= {"curves": True, "k": ks, "budgets": _numbers("--budgets", sampling.budgets)}
        options |= {"reward": bool(sampling.reward), "answer_marker": sampling.answer_marker}
        options["continuation_text"] = sampling.continuation_text
    chat = sampling.apply_chat_template or task.config.chat
    changes: dict[str, Any] = {"options": options, "chat": chat}
    try:
        changes["generation"] = GenerationConfig.model_validate(generation)
    except ValidationError as error:
        raise settings_error(error.errors()[0], "--gen-kwargs", GenerationConfig, "") from error
    if max(options.get("budgets") or (0,)) > generation["max_tokens"]:
        raise ConfigError(
            f"--budgets is {sampling.budgets!r}", expected=f"0 to max_tokens = {generation['max_tokens']} tokens",
            do="lower the budgets, or raise --gen-kwargs max_gen_toks=N",
        )  # fmt: skip
    made = replace(task, config=task.config.model_copy(update=changes))
    made.hash = task_hash(made)
    return made


def generated_task(name: str, *, limit: int | None, seed: int, chat: bool) -> EvalTask | None:
    """Return the task of `arithmetic`, `arithmetic-LEVEL` or a JSONL file of verifiable tasks; None for other names."""
    generation = {"max_tokens": 128}
    base, _, level = name.partition("-")
    if base == "arithmetic" and (not level or level.isdigit()):
        source = Arithmetic(seed=seed, weights={int(level or 1): 1.0})
        problems = source.distinct(N_PROBLEMS if limit is None else limit)
        return verifiable_task(name, [source.task(problem, chat=chat) for problem in problems], generation)
    if Path(name).suffix != ".jsonl":
        return None
    path, quarantine = user_path(name), Quarantine()
    if not path.is_file():
        raise ConfigError(
            f"--task {name}: there is no {path}", expected="a file of tasks", do="check the path"
        )
    tasks = [task for task, _ in zip(read_tasks(path, quarantine), range(limit or sys.maxsize), strict=False)]
    for record in quarantine:
        print(f"skipped: {record}", file=sys.stderr)
    return verifiable_task(path.stem, tasks, generation)


class RewardBackend:
    """A `ModelBackend` of the role "reward": a request with `answer_ids` gets a `Score` whose total is the reward."""

    max_length: int | None = None

    def __init__(self, name: str, address: str, folder: Path, device: str) -> None:
        self.name, self.address = name, address
        self.model, _ = load_reward_model(folder, device=device)
        self.encoder = TokenEncoder.load(folder)

    def respond(self, requests: Sequence[Request], on_response: Callable[[int, Response], None]) -> None:
        """See `ModelBackend`. Raises ConfigError: an answer has ids that the reward model has not."""
        asked = [request for request in requests if isinstance(request, GenerateRequest)]
        examples = [concat(self.encoder.prompt(r.prompt), r.answer_ids) for r in asked]
        rows = self.model.model.config.vocab_size
        if any(int(each.ids.max()) >= rows for each in examples):
            raise ConfigError(
                f"the reward model {self.name} has {rows:,} ids, and an answer has a larger one",
                expected="a reward model of the same tokenizer",
            )
        for n, reward in enumerate(self.model.score_examples(examples).tolist()):
            on_response(n, Score((), (reward,), greedy=False))


def reward_role(sampling: SampleSettings, store: str | None) -> dict[str, ModelBackend]:
    """Return the role of the reward model, if one is given. Raises ConfigError: it is another kind of artifact."""
    if not sampling.reward:
        return {}
    if not (sampling.samples or sampling.budgets):
        raise ConfigError("--reward chooses among samples", expected="--samples", do="give --samples 1,2,4")
    found = open_artifact(sampling.reward, store, ("reward_model",), "a reward_model for --reward")
    found.check()
    return {"reward": RewardBackend(found.name, found.address, found.path, probe().device)}


def _numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",") if part.strip()}))
    except ValueError:
        found = (-1,)
    if any(each < (option == "--samples") for each in found):
        raise ConfigError(f"{option} is {text!r}", expected="comma-separated numbers: 1,2,4")
    return found
