"""Request bodies as pydantic models: OpenAI's parameters with their types and limits, and a few extensions.

Every model forbids unknown fields and parses strictly ("3" is not a number), so that a misspelled parameter is an error.
Parameters of OpenAI that are not implemented are absent and therefore rejected by name. Exceptions are parameters that
cannot affect the output (`metadata`, `prompt_cache_key`): they are accepted and ignored. `user` or `safety_identifier` name
the actor of a completion that is logged.

The schema of /openapi.json also states the limits that are checked outside of the types (`in_schema`), because a wrong item
of a union would give an error about another branch. Limits of a server are not in it: context, vocabulary, choices.

Extensions: top_k, min_p, min_tokens, repetition_penalty, prompt_logprobs, structured_outputs (named as in vLLM); regex and
grammar (constraints of the output), priority (lower is served first), ignore_eos (for benchmarks). Completions have
token_healing (docs/tokens.md). Masked diffusion has steps and reveal (docs/generative.md), a server with a search index
sources (docs/search.md).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from whorl.errors import shorten

T = TypeVar("T")
FastList = Annotated[list[T], Field(fail_fast=True)]  # validation stops at the first wrong item
TokenIds = FastList[Annotated[int, Field(ge=0, lt=1 << 31)]]
LogitBias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=4096)]
MAX_TEXTS = 2048  # prompts of a completion, inputs of embeddings
MAX_STOPS = 16


def in_schema(**rules: Any) -> Any:
    """A field whose rules are stated in the schema and checked elsewhere."""
    return Field(json_schema_extra=rules)


NonEmptyIds = Annotated[TokenIds, in_schema(minItems=1)]
ListOfIds = Annotated[FastList[NonEmptyIds], in_schema(minItems=1, maxItems=MAX_TEXTS)]
ListOfTexts = Annotated[FastList[str], in_schema(minItems=1, maxItems=MAX_TEXTS)]
NonEmptyText = Annotated[str, in_schema(minLength=1)]
ListOfNonEmptyTexts = Annotated[FastList[NonEmptyText], in_schema(minItems=1, maxItems=MAX_TEXTS)]
StopStrings = Annotated[FastList[StopString], in_schema(maxItems=MAX_STOPS)]
WITH_STREAM: dict[str, Any] = {"required": ["stream"], "properties": {"stream": {"const": True}}}
STREAM_OPTIONS_RULE: dict[str, Any] = {
    "anyOf": [{"properties": {"stream_options": {"type": "null"}}}, WITH_STREAM]
}
ONE_INPUT_RULE: dict[str, Any] = {
    "oneOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}}},
    ]
}

FORMS = ("json", "regex", "choice", "grammar")
ONE_FORM_RULE: dict[str, Any] = {
    "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in FORMS]
}


class StrictModel(BaseModel):
    """Forbids unknown fields and type conversion."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(StrictModel):
    include_usage: bool = False
    include_obfuscation: bool = (
        False  # accepted and ignored: padding against traffic analysis is the task of a proxy
    )


class StructuredOutputs(StrictModel):
    """A constraint of the output: one of four forms."""

    model_config = ConfigDict(
        extra="forbid", strict=True, populate_by_name=True, json_schema_extra=ONE_FORM_RULE
    )

    json_: str | dict[str, Any] | None = Field(default=None, alias="json", description="a JSON schema")
    regex: str | None = Field(default=None, max_length=65536)
    choice: FastList[NonEmptyText] | None = Field(default=None, min_length=1, max_length=1024)
    grammar: str | None = Field(default=None, max_length=65536, description="in Lark's syntax")

    @model_validator(mode="after")
    def _check_one_form(self) -> StructuredOutputs:
        if sum(form is not None for form in (self.json_, self.regex, self.choice, self.grammar)) != 1:
            raise ValueError("structured_outputs: give one of json, regex, choice and grammar")
        if self.choice is not None and not all(self.choice):
            raise ValueError("structured_outputs.choice: a text is empty")
        return self


class GenerationRequest(StrictModel):
    """Sampling parameters, shared by completions and chat."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=STREAM_OPTIONS_RULE)

    model: str = Field(min_length=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, le=1 << 31, description="0 or -1 keep all")
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100)
    logit_bias: dict[str, LogitBias] | None = Field(
        default=None, max_length=1024, json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,9}$"}}
    )
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    steps: int | None = Field(default=None, ge=1, le=1 << 20, description="passes of a block")
    reveal: Literal["confidence", "entropy"] | None = None
    n: int | None = Field(default=None, ge=1)
    stop: StopString | StopStrings | None = Field(default=None, union_mode="left_to_right")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    regex: str | None = Field(default=None, max_length=65536, description="pattern of the whole output")
    grammar: str | None = Field(default=None, max_length=65536, description="in Lark's syntax")
    structured_outputs: StructuredOutputs | None = None
    min_tokens: int | None = Field(
        default=None, ge=0, lt=1 << 31, description="no end of the output before; at most max_tokens"
    )
    prompt_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="alternatives of each prompt token; not with stream"
    )
    priority: int | None = Field(default=None, ge=-1000, le=1000)
    ignore_eos: bool | None = None
    sources: int | None = Field(
        default=None,
        ge=0,
        le=20,
        description="passages in the prompt, at most; default 4 of a server with --search",
    )
    user: str | None = None
    store: bool | None = Field(default=None, description="let the server log the completion; needs --log")
    metadata: dict[str, str] | None = Field(default=None, description="pair and side of a comparison")

    @model_validator(mode="after")
    def _check_fields(self) -> GenerationRequest:
        if isinstance(self.stop, list) and len(self.stop) > MAX_STOPS:
            raise ValueError(f"stop: at most {MAX_STOPS} texts")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs: not with stream")
        return self


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: str | ListOfTexts | NonEmptyIds | ListOfIds
    max_tokens: int | None = Field(default=None, ge=0, lt=1 << 31, description="0 only with echo")
    best_of: int | None = Field(default=None, ge=1, description="at least n; not with stream")
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=20)
    token_healing: bool | None = None
    suffix: str | None = Field(default=None, max_length=65536, description="text behind a gap")


class TextPart(StrictModel):
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def check_parts(content: Any) -> Any:
    """Return the content of a message. Raises ValueError: a part of it is an image, a sound or a file."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        for word, name in (("image", "images"), ("audio", "audio"), ("video", "videos"), ("file", "files")):
            if isinstance(kind, str) and word in kind:
                raise ValueError(f"this model reads no {name}; expected parts of the type 'text'")
    return content


class FunctionCall(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(StrictModel):
    """One turn. Content is text, or a list of text parts."""

    _check_content = field_validator("content", mode="before")(check_parts)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FastList[TextPart] | None = None
    name: str | None = None
    tool_calls: FastList[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        default=None, description="for templates that write earlier reasoning"
    )
    refusal: str | None = None
    # Fields that the client library adds to responses, which users send back:
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""


class FunctionDefinition(StrictModel):
    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(StrictModel):
    name: str


class ToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


class JsonSchema(StrictModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    name: str
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema must be given exactly with the type 'json_schema'")
        return self


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: FastList[Message] = Field(min_length=1)
    max_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    max_completion_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: FastList[Tool] | None = Field(default=None, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: FastList[Literal["text"]] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: only with logprobs")
        names = [tool.function.name for tool in self.tools or []]
        if len(set(names)) < len(names):
            raise ValueError("tools: duplicate name")
        if self.tool_choice in ("required",) and not names:
            raise ValueError("tool_choice: requires tools")
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            raise ValueError(f"tool_choice: no tool named {shorten(self.tool_choice.function.name)!r}")
        return self


class InputItem(StrictModel):
    """One item of a response's input: a message."""

    _check_content = field_validator("content", mode="before")(check_parts)

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | FastList[TextPart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class TextFormat(StrictModel):
    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: dict[str, Any] | None = Field(alias="schema", default=None)
    strict: bool | None = None
    description: str | None = None


class TextSettings(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(StrictModel):
    """Body of POST /v1/responses, the basic part: text in, text out; a stored one cannot be retrieved."""

    model: str = Field(min_length=1)
    input: str | Annotated[FastList[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1, lt=1 << 31)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    stream: bool | None = None
    text: TextSettings | None = None
    sources: int | None = Field(default=None, ge=0, le=20, description="as of a completion")
    metadata: dict[str, str] | None = None
    user: str | None = None
    store: bool | None = None
    truncation: Literal["disabled"] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


class EmbeddingsRequest(StrictModel):
    """Body of POST /v1/embeddings."""

    model: str = Field(min_length=1)
    input: NonEmptyText | ListOfNonEmptyTexts | NonEmptyIds | ListOfIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(default=None, ge=1, description="first numbers of each embedding")
    user: str | None = None


class TokenizeRequest(StrictModel):
    """Body of POST /tokenize: a text, or a conversation including the tokens of the template."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=ONE_INPUT_RULE)

    model: str | None = None
    prompt: str | None = None
    messages: FastList[Message] | None = Field(default=None, min_length=1)
    tools: FastList[Tool] | None = Field(default=None, max_length=128)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True

    @model_validator(mode="after")
    def _check_one_input(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
