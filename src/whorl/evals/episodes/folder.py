"""A folder of files and a few tools: the environment of agents.

    python   code            run a program in the folder
    write    path, content   write a file
    read     path            show a file
    list                     show the names and sizes of all files
    finish   answer          end

Calls have the form of `tokens/chat/tool_calls.py`. The tools are described in the system message, and results are messages
of the user, so that any model and any endpoint can make them. The folder is a mapping of paths to contents. A program gets
it as its work folder and returns it; the other tools change it here, so no file of an agent is ever on the disk outside of
the sandbox.

Budgets are messages of the model, their tokens, and seconds of programs. The time of the model is not counted: it depends on
the other requests and on the cache. An episode with the same replies is therefore the same episode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from whorl.engine.sampling_params import SamplingParams
from whorl.errors import ConfigError
from whorl.evals.episodes.config import EpisodeConfig
from whorl.evals.episodes.env_loop import EnvLoop
from whorl.evals.episodes.environment import EnvServices, Reply, TextEnv, Turn
from whorl.evals.episodes.runner import Episode, EpisodeRunner, ReplySampler
from whorl.evals.grading.task import VerifiableTask
from whorl.evals.model.requests import Message
from whorl.sandbox import Program, ProgramResult, ResourceLimits, Sandbox
from whorl.sandbox.work_folder import MAX_FILES, check_paths
from whorl.tokens.chat.tool_calls import ParsedToolCall, describe_tools, parse_reply, tool_response

GROUPS = {"python": ("python",), "files": ("write", "read", "list"), "finish": ("finish",)}
TOOLS = {
    "python": ("Run a Python program in the folder and return what it prints.", ("code",)),
    "write": ("Write a file.", ("path", "content")),
    "read": ("Return the content of a file.", ("path",)),
    "list": ("Return the names and sizes of all files.", ()),
    "finish": ("End the task with an answer in a few words.", ("answer",)),
}
BYTES_PER_TOKEN = 4  # of an endpoint that states no ids
NO_CALL = "Your message contains no call of a function."
Ended = Literal["", "finished", "steps", "tokens", "seconds"]


@dataclass(frozen=True)
class FolderTask(VerifiableTask):
    """A task with the files of its folder at the start: path -> content."""

    files: Mapping[str, bytes] = field(default_factory=dict)


class FolderOptions(BaseModel):
    """Tools and budgets of one episode."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tools: tuple[Literal["python", "files", "finish"], ...] = ("python", "files", "finish")
    steps: int = Field(default=12, ge=1, description="messages of a run, at most")
    tokens: int = Field(default=8192, ge=1, description="tokens of all messages of a run, at most")
    seconds: float = Field(default=30.0, gt=0, description="time of all programs of a run, at most")
    program_seconds: float = Field(default=5.0, gt=0, description="time of one program, and of the tests")
    memory_bytes: int = Field(default=512 << 20, ge=1 << 20)
    file_bytes: int = Field(default=1 << 20, ge=0, description="of all files of a run together")
    observation: int = Field(default=4000, ge=100, description="characters of a result that the model sees")
    workers: int = Field(default=2, ge=1, description="programs that run at once")

    @property
    def limits(self) -> ResourceLimits:
        """Limits of one program."""
        return ResourceLimits(self.program_seconds, self.program_seconds, self.memory_bytes, self.file_bytes)


class _FolderEpisodes(EpisodeConfig):
    options: FolderOptions

    def make(self, services: EnvServices) -> FolderEnv:
        """See `EpisodeConfig`."""
        return FolderEnv(services, self.options)


class FolderEnv(TextEnv):
    """See the top of this file. Without tools, the first message is the answer.

    Attributes:
        files: path -> content.
        steps: for each message and each result a mapping with role, tool, content and counts.
        ended: why the episode is over. answer: of the call `finish`, or the last message without tools.
        n_messages, tokens, seconds, errors: used so far; calls that failed.
    """

    needs_sandbox = True

    def __init__(self, services: EnvServices, budget: FolderOptions) -> None:
        super().__init__(services)
        self.budget, self.max_tokens = budget, budget.tokens
        self.names = [name for group in budget.tools for name in GROUPS[group]]
        self.files: dict[str, bytes] = {}
        self.steps: list[dict[str, Any]] = []
        self.ended: Ended = ""
        self.answer = ""
        self.n_messages = self.tokens = self.errors = 0
        self.seconds = 0.0

    def reset(self, task: VerifiableTask) -> list[Message]:
        """Return the first messages: the system message with the tools, the task, and the names of its files."""
        self.files = dict(task.files) if isinstance(task, FolderTask) else {}
        given = list(task.messages) or [{"role": "user", "content": task.prompt}]
        system = [self._instructions()] if self.names else []
        system += [m["content"] for m in given if m["role"] == "system"]
        given = [m for m in given if m["role"] != "system"]
        if self.files and given:
            names = ", ".join(sorted(self.files))
            given[-1] = {**given[-1], "content": f"{given[-1]['content']}\n\nFiles in the folder: {names}"}
        return [{"role": "system", "content": "\n\n".join(system)}, *given] if system else given

    def _instructions(self) -> str:
        return (
            f"You solve a task by calls of functions, which act in a folder of files.\n\n"
            f"{describe_tools([_schema(name) for name in self.names])}\n\nYou see the result of a call before you write the "
            f"next message. You have {self.budget.steps} messages. The state of the folder counts at the end, so make "
            "sure that it is right before you finish."
        )

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        """Call the functions of a reply in their order, up to `finish`."""
        used = len(reply.ids) or math.ceil(len(reply.text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)
        self.n_messages += 1
        self.tokens += used
        self.max_tokens = max(1, self.budget.tokens - self.tokens)
        self.steps.append({"role": "model", "content": reply.text, "tokens": used})
        if not self.names:
            self.ended, self.answer = "finished", reply.text
            return Turn(done=True)
        parsed = parse_reply(reply.text)
        shown: list[str] = []
        if parsed.calls:
            self.steps[-1]["tool"] = parsed.calls[0].name
        else:
            text = NO_CALL if reply.finished else "The limit of tokens cut your message."
            shown.append(self._fail(f"{text} Write one, such as {self._example()}"))
        for call in parsed.calls:
            shown.append(await self._call(call))
            if self.ended:
                return Turn(done=True, info={"tool_calls": len(shown)})
        budget = self.budget
        if self.seconds >= budget.seconds:
            self.ended = "seconds"
        elif self.n_messages >= budget.steps:
            self.ended = "steps"
        elif self.tokens >= budget.tokens:
            self.ended = "tokens"
        message = {"role": "user", "content": "\n".join(map(tool_response, shown))}
        counts = {"tool_calls": len(parsed.calls), "malformed_calls": parsed.malformed}
        return Turn([message], truncated=bool(self.ended), info=counts)

    def _example(self) -> str:
        name = self.names[-1]
        arguments = dict.fromkeys(TOOLS[name][1], "...")
        return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"

    async def _call(self, call: ParsedToolCall) -> str:
        """Return the result of a call, as the model sees it."""
        if call.name not in self.names:
            return self._fail(f"There is no function {call.name!r}.")
        try:
            given = json.loads(call.arguments)
            arguments = [given[name] for name in TOOLS[call.name][1]]
        except (ValueError, KeyError, TypeError):
            arguments = [None]
        if not all(isinstance(each, str) for each in arguments):
            expected = ", ".join(TOOLS[call.name][1])
            return self._fail(f"{call.name} has wrong arguments; expected the texts {expected}.")
        if call.name == "python":
            files = dict(self.files)
            return self._observe(await self.services.run(Program(arguments[0], files=files, keep_files=True)))
        if call.name == "write":
            return self._write(arguments[0], arguments[1].encode("utf-8", "replace"))
        if call.name == "read":
            if (content := self.files.get(arguments[0])) is None:
                return self._fail(f"There is no file {arguments[0]!r}.")
            return self._show("read", content.decode("utf-8", "replace"))
        if call.name == "list":
            lines = [f"{name}  {len(content):,} bytes" for name, content in sorted(self.files.items())]
            return self._show("list", "\n".join(lines) or "(the folder is empty)")
        self.answer, self.ended = arguments[0].strip(), "finished"
        return ""

    def _observe(self, result: ProgramResult) -> str:
        """Take the output and the files of a program."""
        self.files = dict(result.files)
        self.seconds += result.seconds
        text = result.output.rstrip("\n")
        if not result.ok:
            self.errors += 1
            text = f"{text}\n{result.reason}".lstrip("\n")
        return self._show("python", text or "(no output)", seconds=round(result.seconds, 3))

    def _write(self, path: str, content: bytes) -> str:
        files = {**self.files, path: content}
        try:
            check_paths(files)
        except ConfigError as error:
            return self._fail(f"{error.what}; expected {error.expected}")
        if sum(map(len, files.values())) > self.budget.file_bytes or len(files) > MAX_FILES:
            return self._fail(
                f"The folder holds at most {self.budget.file_bytes:,} bytes in {MAX_FILES:,} files."
            )
        self.files = files
        return self._show("write", f"Wrote {len(content):,} bytes.")

    def _fail(self, text: str) -> str:
        self.errors += 1
        return self._show("error", text)

    def _show(self, tool: str, text: str, **more: Any) -> str:
        shown = clip(text, self.budget.observation)
        self.steps.append({"role": "tool", "tool": tool, "content": shown, **more})
        return shown


def run_agents(
    tasks: Sequence[VerifiableTask],
    options: FolderOptions,
    sampler: ReplySampler,
    on_end: Callable[[int, Episode], None] = lambda n, episode: None,
) -> list[Episode]:
    """Return an episode of each task, in order; its `env` is a `FolderEnv`.

    on_end: called with the index of each episode that ends.
    """
    config = _FolderEpisodes(max_turns=options.steps, options=options)
    with closing(EnvLoop(lambda tasks, texts: [], _FreshSandbox(options))) as loop:
        return EpisodeRunner(sampler, loop, config).run(tasks, SamplingParams(), on_end=on_end)


class _FreshSandbox:
    """Runs each batch of programs in a new sandbox: freed memory then holds no program of an earlier batch."""

    def __init__(self, options: FolderOptions) -> None:
        self.options = options

    def run_all(self, programs: Sequence[Program]) -> list[ProgramResult]:
        with Sandbox(self.options.limits, workers=min(self.options.workers, len(programs))) as sandbox:
            return sandbox.run_all(programs)

    def close(self) -> None:
        """Nothing stays open."""


def clip(text: str, most: int) -> str:
    """Return a text without its middle, if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters ...\n{text[-half:]}"


def _schema(name: str) -> dict[str, Any]:
    about, arguments = TOOLS[name]
    properties = {argument: {"type": "string"} for argument in arguments}
    parameters = {"type": "object", "properties": properties, "required": list(arguments)}
    return {"name": name, "description": about, "parameters": parameters}
