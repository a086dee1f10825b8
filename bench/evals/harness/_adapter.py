"""Our models under lm-evaluation-harness 0.4: it makes the requests and the figures, a back end answers.

    python -m bench.evals.harness._adapter run --model whorl --model_args pretrained=NAME --tasks hellaswag

    lm = adapt(EngineBackend.open("quickstart/pretrain"))             in Python
    lm_eval.simple_evaluate(model=lm, tasks=["hellaswag"])

loglikelihood is a `ScoreRequest`, loglikelihood_rolling a `TextRequest` whose windows do not overlap, and generate_until a
`GenerateRequest`. The arguments of `--model_args` are those of `EngineBackend.open`.

The harness has no missing answers, so a `Missing` response is an error here. A chat template is refused: the harness turns
messages into text, which is tokenized again; `whorl eval` and the harness's `local-chat-completions` send messages.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from whorl.errors import ConfigError, DataError, WhorlError, one_of
from whorl.evals.model.engine_backend import EngineBackend
from whorl.evals.model.requests import (
    Completion,
    GenerateRequest,
    Missing,
    ModelBackend,
    Request,
    Response,
    Score,
    ScoreRequest,
    TextRequest,
)

NAME = "whorl"  # of --model
MAX_TOKENS = 256  # the harness's default
LIMITS = (
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "max_completion_tokens",
)  # names of one setting, by priority
GENERATION = (*LIMITS, "until", "do_sample", "temperature", "top_p", "seed")
IGNORED = ("device", "max_batch_size")  # arguments that the harness adds


class HarnessAdapter:
    """The methods of the harness's `LM`; `adapt` adds its base class.

    Args:
        backend: answers the requests.
    """

    def __init__(self, backend: ModelBackend) -> None:
        super().__init__()
        self.backend = backend

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (log-probability, whether greedy decoding produces it) of each (context, continuation)."""
        scores = self._scores([ScoreRequest(*each.args) for each in requests])
        return [(score.total, score.greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-probability of each text, in windows that do not overlap."""
        length = self.backend.max_length or 0
        scores = self._scores([TextRequest(each.args[0], length, length, True) for each in requests])
        return [score.total for score in scores]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return a completion of each (context, settings).

        Raises:
            ConfigError: a setting without counterpart.
        """
        made = self._respond([_generation(*each.args) for each in requests])
        return [response.text for response in made if isinstance(response, Completion)]

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Raise ConfigError; see the top of this file."""
        raise ConfigError(
            "the adapter tokenizes text, in which a message could spell the tokens of a chat template",
            expected="a run without --apply_chat_template",
            do="use `whorl eval`, or --model local-chat-completions with `whorl serve`",
        )

    def _scores(self, requests: Sequence[Request]) -> list[Score]:
        return [response for response in self._respond(requests) if isinstance(response, Score)]

    def _respond(self, requests: Sequence[Request]) -> list[Response]:
        found: dict[int, Response] = {}
        self.backend.respond(requests, found.__setitem__)
        for n, request in enumerate(requests):
            response = found[n]
            if isinstance(response, Missing):
                raise DataError(f"request {n} has no response: {response.reason}: {request!r:.200}")
        return [found[n] for n in range(len(requests))]

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> HarnessAdapter:
        """Return the model of `--model_args`.

        Raises:
            ConfigError: no such model, or a wrong argument.
        """
        given = {k: v for k, v in {**(additional_config or {}), **arg_dict}.items() if v is not None}
        options = {k: v for k, v in given.items() if k not in IGNORED}
        ref = options.pop("pretrained", None)
        if ref is None:
            raise ConfigError("--model_args names no model", do="give pretrained=NAME or pretrained=FOLDER")
        if options.get("batch_size") in (
            "auto",
            1,
            "1",
        ):  # the harness's default, too small for the engine
            del options["batch_size"]
        elif "batch_size" in options:
            options["batch_size"] = int(options["batch_size"])
        return cls(EngineBackend.open(ref, **options))

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> HarnessAdapter:
        """Return the model of "key=value,key=value"; see `create_from_arg_obj`."""
        parse = importlib.import_module("lm_eval.utils").simple_parse_args_string
        return cls.create_from_arg_obj(parse(arg_string), additional_config)


def adapter_class() -> type[Any]:
    """Return the class of the adapter, a subclass of the harness's `LM`.

    Raises:
        ConfigError: lm-evaluation-harness is not installed.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise ConfigError("the adapter needs the package lm_eval", do="pip install 'lm-eval>=0.4.9,<0.5'")
    base: type[Any] = importlib.import_module("lm_eval.api.model").LM
    return type("WhorlLM", (HarnessAdapter, base), {"__doc__": HarnessAdapter.__doc__})


def adapt(backend: ModelBackend) -> Any:
    """Return a model for `lm_eval.simple_evaluate`. Raises ConfigError: lm-evaluation-harness is not installed."""
    return adapter_class()(backend)


def register() -> None:
    """Add the model "whorl" to the harness's registry."""
    made = adapter_class()
    importlib.import_module("lm_eval.api.registry").register_model(NAME)(made)


def _generation(context: str, settings: Mapping[str, Any]) -> GenerateRequest:
    for key in settings:
        if key not in GENERATION:
            raise ConfigError(
                f"the generation setting {key!r} has no counterpart", expected=one_of(key, list(GENERATION))
            )
    until = settings.get("until") or ()
    limits = (settings.get(name) for name in LIMITS)
    temperature = float(settings.get("temperature") or 0.0)
    if settings.get("do_sample") is False:
        temperature = 0.0
    return GenerateRequest(
        context, next((int(n) for n in limits if n is not None), MAX_TOKENS),
        (until,) if isinstance(until, str) else tuple(until), temperature, float(settings.get("top_p") or 1.0),
        int(settings.get("seed") or 0),
    )  # fmt: skip


def main() -> None:
    """Run the harness's command line with the model "whorl". Raises SystemExit: with the message of a `WhorlError`."""
    try:
        register()
        importlib.import_module("lm_eval.__main__").cli_evaluate()
    except WhorlError as error:
        raise SystemExit(f"whorl: {error}") from error


if __name__ == "__main__":
    main()
