"""Converts request bodies to engine requests: prompts to ids, limits checked, sampling parameters renamed.

One request may be many sequences: `n` outputs for each of several prompts. Output i uses the given seed plus i, so the
same request with the same seed returns the same outputs.

Defaults are OpenAI's: temperature 1, top_p 1, max_tokens 16 for completions and the remaining context for chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ValidationError

from whorl.engine.request import Request
from whorl.engine.sampling_params import SamplingParams
from whorl.errors import shorten
from whorl.serve.api.protocol import (
    MAX_TEXTS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Tool,
    ToolChoice,
)
from whorl.serve.api.tools import output_grammar, tool_choice_grammar
from whorl.serve.config import ServeConfig
from whorl.serve.errors import ApiError
from whorl.serve.worker.model_entry import ServedModel
from whorl.tokens.chat.tool_calls import ToolCallParser

MAX_LOGPROBS = 1 << 18  # of one response: with text and bytes about 20 MB of JSON, and 80 MB while it is made
DEFAULT_COMPLETION_TOKENS = 16


@dataclass(frozen=True)
class ParsedPrompt:
    """One prompt.

    ids: without the healed end. text: its bytes. n_tokens: ids of the whole prompt.
    required: the end of `text` that the output must repeat (token healing).
    """

    ids: list[int]
    text: bytes
    n_tokens: int
    required: bytes = b""


@dataclass(frozen=True)
class ParsedRequest:
    """Engine requests of one body: `best_of` for each prompt, in the order of the prompts. The best `n` are returned.

    n_top: alternatives of each token in the response; None: a response without log-probabilities. n_prompt_top: the same of
    the prompt (`prompt_logprobs`).
    include_usage: in the last chunk of a stream. echo: the text begins with the prompt. no_output: `max_tokens` is 0.
    tool_parser: makes the parser of one reply's tool calls; None: a reply has none. max_calls: calls of a reply.
    """

    prompts: list[ParsedPrompt]
    requests: list[Request]
    best_of: int
    n: int
    n_top: int | None
    include_usage: bool
    echo: bool = False
    no_output: bool = False
    tool_parser: Callable[[], ToolCallParser] | None = None
    max_calls: int | None = None
    n_prompt_top: int | None = None

    @property
    def n_prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(prompt.n_tokens for prompt in self.prompts)


def parse_completion(
    body: CompletionRequest, served: ServedModel, config: ServeConfig, client: str = ""
) -> ParsedRequest:
    """Return the sequences of a completion.

    Raises:
        ApiError: an invalid parameter, with its name.
    """
    n, best = body.n or 1, body.best_of or body.n or 1
    if best < n:
        raise ApiError(400, f"best_of is {best} and n is {n}: best_of must be at least n", param="best_of")
    if best > n and body.stream:
        raise ApiError(400, "best_of: cannot be used with stream", param="best_of")
    scoring = bool(body.echo and body.logprobs is not None) or body.prompt_logprobs is not None
    grammar = output_grammar(body)
    plain = served.heals and not scoring and grammar is None
    given = _prompt_list(body.prompt)
    _check_sequence_count(best * len(given), config, "best_of" if body.best_of else "n")
    prompts = [_prompt(p, served, plain and body.token_healing is not False) for p in given]
    requested = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if requested == 0 and not body.echo:
        raise ApiError(400, "max_tokens: 0 is allowed only with echo", param="max_tokens")
    requests, suffix = [], served.tokenizer.encode_to_list(body.suffix) if body.suffix else []
    for prompt in prompts:
        max_tokens = _max_new_tokens(
            prompt.n_tokens + len(suffix), max(1, requested), served, "max_tokens", "prompt"
        )
        one = _request(
            body, served, prompt.ids, max_tokens=max_tokens, stop_ids=frozenset(served.tokenizer.end_ids), client=client,
            grammar=grammar, forced_prefix=prompt.required, top_log_probs=max(body.logprobs or 0, body.prompt_logprobs or 0),
            prompt_log_probs=scoring, suffix=tuple(suffix),
        )  # fmt: skip
        requests += _copies(one, best)
    _check_logprobs(requests, body.logprobs, "max_tokens")
    return ParsedRequest(
        prompts, requests, best, n, body.logprobs, _includes_usage(body), bool(body.echo), requested == 0,
        n_prompt_top=body.prompt_logprobs,
    )  # fmt: skip


def parse_chat(
    body: ChatRequest, served: ServedModel, config: ServeConfig, client: str = ""
) -> ParsedRequest:
    """Return the sequences of the next turn of a chat.

    Raises:
        ApiError: an invalid parameter, with its name. DataError: the chat template rejects the messages.
    """
    n = body.n or 1
    _check_sequence_count(n, config, "n")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "give max_completion_tokens or max_tokens, not both", param="max_tokens")
    choice = body.tool_choice
    grammar = output_grammar(body)
    forced = tool_choice_grammar(body.tools or [], choice)
    if forced is not None:
        if grammar is not None:
            raise ApiError(
                400, "tool_choice and another field both constrain the output", param="tool_choice"
            )
        grammar = forced
    tools = template_tools(body.tools or []) if choice != "none" else []
    variables = template_kwargs(body.chat_template_kwargs)
    ids = served.chat_template.encode_prompt(template_messages(body.messages), tools, variables=variables)
    which = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    max_tokens = _max_new_tokens(
        len(ids), body.max_tokens or body.max_completion_tokens, served, which, "messages"
    )
    n_top = body.top_logprobs or 0
    one = _request(
        body, served, ids, max_tokens=max_tokens, stop=served.chat_template.stop, stop_ids=served.chat_template.stop_ids,
        client=client, grammar=grammar, top_log_probs=max(n_top, body.prompt_logprobs or 0),
        prompt_log_probs=body.prompt_logprobs is not None,
    )  # fmt: skip
    requests = _copies(one, n)
    shown = n_top if body.logprobs else None
    _check_logprobs(requests, shown, which)
    parser = partial(ToolCallParser, forced=choice == "required" or isinstance(choice, ToolChoice))
    return ParsedRequest(
        [ParsedPrompt(ids, b"", len(ids))], requests, n, n, shown, _includes_usage(body),
        tool_parser=parser if tools else None, max_calls=1 if body.parallel_tool_calls is False else None,
        n_prompt_top=body.prompt_logprobs,
    )  # fmt: skip


def template_messages(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Return messages for a chat template, which brings them into the form that it expects."""
    fields = {"role", "name", "tool_calls", "tool_call_id", "reasoning_content"}
    return [
        {**message.model_dump(include=fields, exclude_none=True), "content": message.text}
        for message in messages
    ]


def template_tools(tools: Iterable[Tool]) -> list[dict[str, object]]:
    """Return tools for a chat template."""
    return [tool.model_dump(exclude_none=True) for tool in tools]


def check_length(ids: Sequence[int], max_model_len: int, param: str) -> None:
    """Raise ApiError if `ids` alone exceed the context."""
    if len(ids) > max_model_len:
        raise ApiError(
            400,
            f"This model's context is {max_model_len:,} tokens; {param} has {len(ids):,}.",
            param=param,
            code="context_length_exceeded",
        )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError if `ids` is empty or contains an id outside of the vocabulary."""
    if not ids:
        raise ApiError(400, f"{param} is empty", param=param, code="invalid_value")
    if max(ids) >= vocab_size:
        raise ApiError(
            400,
            f"{param}: the id {max(ids)} is outside of the vocabulary of size {vocab_size:,}",
            param=param,
        )


def _request(
    body: GenerationRequest,
    served: ServedModel,
    ids: Sequence[int],
    *,
    stop: tuple[bytes, ...] = (),
    stop_ids: frozenset[int],
    **fields: Any,
) -> Request:
    """Return the request of one sequence. stop, stop_ids: of the model; the body adds its own. fields: of `Request`."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if (body.min_tokens or 0) > fields["max_tokens"]:
        message = (
            f"min_tokens is {body.min_tokens:,}, and at most {fields['max_tokens']:,} tokens are generated"
        )
        raise ApiError(400, message, param="min_tokens", code="invalid_value")
    return Request(
        id=secrets.token_hex(12),
        ids=tuple(ids),
        sampling=_sampling(body, served),
        stop=(*stop, *(s.encode() for s in stops)),
        stop_ids=frozenset() if body.ignore_eos else stop_ids,
        priority=body.priority or 0,
        adapter=served.adapter,
        model=served.engine,
        min_tokens=body.min_tokens or 0,
        **fields,
    )


def _copies(request: Request, n: int) -> list[Request]:
    """Return `n` sequences of one prompt, with consecutive seeds. A copy is not validated again."""
    out, seed = [], request.sampling.seed
    for i in range(n):
        change: dict[str, object] = {"id": f"{request.id}-{i}"}
        if seed is not None:
            change["sampling"] = request.sampling.model_copy(update={"seed": (seed + i) % (1 << 63)})
        out.append(request.model_copy(update=change))
    return out


def _includes_usage(body: GenerationRequest) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _check_logprobs(requests: Sequence[Request], n_top: int | None, param: str) -> None:
    """Check that the response does not have more log-probabilities than `MAX_LOGPROBS`; None: its output has none."""
    n = sum(len(r.ids) * (1 + r.top_log_probs) for r in requests if r.prompt_log_probs)
    n += 0 if n_top is None else sum(r.max_tokens for r in requests) * (1 + n_top)
    if n > MAX_LOGPROBS:
        raise ApiError(
            400,
            f"{param}: {n:,} log-probabilities requested (sequences x tokens x (1 + alternatives)); "
            f"at most {MAX_LOGPROBS:,} are returned",
            param=param,
            code="invalid_value",
        )


def _sampling(body: GenerationRequest, served: ServedModel) -> SamplingParams:
    given: dict[str, object] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
    }
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    for name in ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "steps", "reveal"):
        if (value := getattr(body, name)) is not None:
            given[name] = value
    if body.seed is not None:
        given["seed"] = body.seed % (1 << 63)
    if body.logit_bias:
        given["logit_bias"] = _logit_bias(body.logit_bias, served.vocab_size)
    try:
        return SamplingParams(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        problem = error.errors()[0]
        param = str(problem["loc"][0])
        raise ApiError(400, f"{param}: {problem['msg']}", param=param, code="invalid_value") from error


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    out = {}
    for text, value in given.items():
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if not 0 <= number < vocab_size:
            raise ApiError(
                400,
                f"logit_bias: {shorten(text)!r} is not a token id of this model (0 to {vocab_size - 1})",
                param="logit_bias",
            )
        out[number] = value
    return out


def _prompt_list(
    prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
) -> list[str | list[int]]:
    """Return the prompts of a request; the API has four forms for one or many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty", param="prompt", code="invalid_value")
    if isinstance(prompt[0], int):
        return [[i for i in prompt if isinstance(i, int)]]
    if len(prompt) > MAX_TEXTS:
        raise ApiError(400, f"prompt: {len(prompt):,} prompts; {MAX_TEXTS} at most", param="prompt")
    return [p if isinstance(p, str) else [int(i) for i in p] for p in prompt if not isinstance(p, int)]


def _prompt(given: str | list[int], served: ServedModel, heal: bool) -> ParsedPrompt:
    if isinstance(given, str):
        _check_text_length(given, served)
        if heal:
            healed = served.tokenizer.heal_prompt(given)
            return ParsedPrompt(healed.ids, given.encode(), healed.n_tokens, healed.forced_prefix)
        ids = served.tokenizer.encode_prompt(given)
        return ParsedPrompt(ids, given.encode(), len(ids))
    check_ids(given, served.vocab_size, "prompt")
    decodable = (i for i in given if i < served.tokenizer.vocab_size)
    return ParsedPrompt(given, served.tokenizer.decode(decodable), len(given))


def _check_text_length(text: str, served: ServedModel) -> None:
    """Raise ApiError, before the text is tokenized, if it cannot fit in the context even in the longest tokens."""
    least = len(text.encode("utf-8", "surrogatepass")) // served.longest_token if served.longest_token else 0
    if least > served.max_model_len:
        raise ApiError(
            400,
            f"This model's context is {served.max_model_len:,} tokens; the request has {least:,} or more in prompt.",
            param="prompt",
            code="context_length_exceeded",
        )


def _max_new_tokens(
    n_prompt: int, requested: int | None, served: ServedModel, param: str, source: str
) -> int:
    """Return the number of tokens to generate: the requested number, or the remaining context.

    Raises:
        ApiError: the prompt and the requested tokens exceed the context.
    """
    remaining = served.max_model_len - n_prompt
    if remaining < (requested or 1):
        output = f" and {requested:,} for the output ({param})" if requested else ""
        raise ApiError(
            400,
            f"This model's context is {served.max_model_len:,} tokens; the request has {n_prompt:,} in {source}{output}.",
            param=source if remaining < 1 else param,
            code="context_length_exceeded",
        )
    return requested or remaining


def _check_sequence_count(count: int, config: ServeConfig, param: str) -> None:
    if count > config.max_choices:
        raise ApiError(
            400,
            f"{param}: {count:,} sequences requested, at most {config.max_choices} allowed",
            param=param,
            code="invalid_value",
        )


def template_kwargs(given: dict[str, object] | None) -> dict[str, object]:
    """Check the extra variables of a chat template; they must not replace the conversation."""
    taken = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"} & (given or {}).keys()
    if taken:
        name = sorted(taken)[0]
        raise ApiError(400, f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs")
    return given or {}
