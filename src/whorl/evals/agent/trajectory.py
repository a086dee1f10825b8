"""One run of an agent: messages, calls of tools, the files of its folder, and budgets.

    run = AgentRun(messages, budget, files, tools)
    while not run.ended:
        program = run.receive(response to run.request())      acts on the files, or returns a program for the sandbox
        if program is not None:
            run.observe(sandbox.run(program))

The folder is a mapping of paths to contents. A program gets it as its work folder and returns it; the other tools change it
here, so that no file of an agent is ever on the disk outside of the sandbox.

Budgets are steps (messages of the model), tokens of its messages, and seconds of its programs. The time of the model is not
counted: it depends on the other requests and on the cache. A run with the same responses is therefore the same run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from whorl.errors import ConfigError
from whorl.evals.agent.actions import Action, parse_action
from whorl.evals.model.requests import Completion, GenerateRequest, Message, Response
from whorl.sandbox import Program, ProgramResult
from whorl.sandbox.work_folder import MAX_FILES, check_paths

Ended = Literal["", "finished", "steps", "tokens", "seconds", "missing"]
BYTES_PER_TOKEN = 4  # of an endpoint that states no ids
NO_ACTION = "Your message contains no action. Write one block, such as\n```list\n```"


@dataclass(frozen=True)
class RunBudget:
    """Limits of one run.

    Attributes:
        steps: messages of the model. tokens: of all its messages; seconds: of all its programs.
        message_tokens: of one message. observation: characters of a tool's output that the model sees.
        file_bytes: of all files together.
    """

    steps: int = 12
    tokens: int = 8192
    seconds: float = 30.0
    message_tokens: int = 1024
    observation: int = 4000
    file_bytes: int = 1 << 20


@dataclass
class AgentRun:
    """See the top of this file.

    Attributes:
        messages: the conversation, with the system message and the task first.
        files: path -> content.
        tools: names of allowed calls; without any, the first message is the answer.
        sampling: temperature, top_p and seed of each request.
        steps: the trajectory: for each message and each result a mapping with role, tool, content and counts.
        ended: why the run is over; "" while it is not.
        answer: of the call `finish`, or the last message without tools.
        tokens, seconds, errors: used so far; calls that failed. n_given: messages before the first of the model.
    """

    messages: list[Message]
    budget: RunBudget
    files: dict[str, bytes]
    tools: Collection[str]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: Ended = ""
    answer: str = ""
    reason: str = ""
    n_messages: int = 0
    tokens: int = 0
    seconds: float = 0.0
    errors: int = 0
    n_given: int = field(init=False)

    def __post_init__(self) -> None:
        self.n_given = len(self.messages)

    def request(self) -> GenerateRequest:
        """Return the request for the next message."""
        most = min(self.budget.message_tokens, self.budget.tokens - self.tokens)
        return GenerateRequest(tuple(self.messages), most, **self.sampling)

    def receive(self, response: Response) -> Program | None:
        """Act on a message; return the program to run, or None."""
        if not isinstance(response, Completion):
            self.ended, self.reason = "missing", getattr(response, "reason", "no message")
            return None
        text = response.text
        action = parse_action(text, self.tools)
        if action is not None:
            text = text[: action.end]
        self.n_messages += 1
        used = len(response.ids) or math.ceil(len(response.text.encode("utf-8", "replace")) / BYTES_PER_TOKEN)
        self.tokens += used
        self.messages.append({"role": "assistant", "content": text or "(empty)"})
        self.steps.append({"role": "model", "content": text, "tokens": used})
        if not self.tools:
            self.ended, self.answer = "finished", text
            return None
        cut = response.finish == "length"
        if action is None or (cut and not action.closed):
            self._fail("The limit of tokens cut your message." if cut else NO_ACTION)
            return None
        if action.tool == "python":
            self.steps[-1]["tool"] = "python"
            return Program(action.content, files=dict(self.files), keep_files=True)
        self._act(action)
        return None

    def observe(self, result: ProgramResult) -> None:
        """Take the output and the files of a program."""
        self.files = dict(result.files)
        self.seconds += result.seconds
        text = result.output.rstrip("\n")
        if result.ok:
            self._show(text or "(no output)", "python", seconds=round(result.seconds, 3))
            return
        self.errors += 1
        self._show(f"{text}\n{result.reason}".lstrip("\n"), "python", seconds=round(result.seconds, 3))

    def _act(self, action: Action) -> None:
        """Call a tool other than python."""
        path = action.argument
        self.steps[-1]["tool"] = action.tool
        if action.tool == "finish":
            self.answer, self.ended = (action.content.strip() or path), "finished"
        elif action.tool == "list":
            lines = [f"{name}  {len(content):,} bytes" for name, content in sorted(self.files.items())]
            self._show("\n".join(lines) or "(the folder is empty)", "list")
        elif action.tool == "read":
            if path in self.files:
                self._show(self.files[path].decode("utf-8", "replace"), "read")
            else:
                self._fail(f"There is no file {path!r}.")
        else:
            self._write(path, action.content.encode("utf-8", "replace"))

    def _write(self, path: str, content: bytes) -> None:
        files = {**self.files, path: content}
        try:
            check_paths(files)
        except ConfigError as error:
            self._fail(f"{error.what}; expected {error.expected}")
            return
        if sum(map(len, files.values())) > self.budget.file_bytes or len(files) > MAX_FILES:
            self._fail(f"The folder holds at most {self.budget.file_bytes:,} bytes in {MAX_FILES:,} files.")
            return
        self.files = files
        self._show(f"Wrote {len(content):,} bytes.", "write")

    def _fail(self, text: str) -> None:
        self.errors += 1
        self._show(text, "error")

    def _show(self, text: str, tool: str, **more: Any) -> None:
        """Append a tool's output to the conversation, and end the run if a budget is used up."""
        shown = clip(text, self.budget.observation)
        self.messages.append({"role": "user", "content": f"[{tool}]\n{shown}"})
        self.steps.append({"role": "tool", "tool": tool, "content": shown, **more})
        budget = self.budget
        if self.seconds >= budget.seconds:
            self.ended = "seconds"
        elif self.n_messages >= budget.steps:
            self.ended = "steps"
        elif self.tokens >= budget.tokens:
            self.ended = "tokens"


def clip(text: str, most: int) -> str:
    """Return a text without its middle, if it has more than `most` characters."""
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters ...\n{text[-half:]}"


def start_messages(system: str, prompt: str | Sequence[Message], files: Mapping[str, bytes]) -> list[Message]:
    """Return the first messages of a run: the system message with the tools, the task, and the files that are there."""
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
    own = [m["content"] for m in given if m["role"] == "system"]
    given = [m for m in given if m["role"] != "system"]
    if files and given:
        names = ", ".join(sorted(files))
        given[-1] = {**given[-1], "content": f"{given[-1]['content']}\n\nFiles in the folder: {names}"}
    text = "\n\n".join(part for part in (system, *own) if part)
    return [{"role": "system", "content": text}, *given] if text else list(given)
