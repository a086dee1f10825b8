"""Calls of tools as text: one fenced block per message, so that any model and any endpoint can make them.

    ```python                   run a program in the folder
    ```write notes/a.txt        write a file: the lines of the block
    ```read notes/a.txt         show a file
    ```list                     show the names and sizes of all files
    ```finish                   end; the lines of the block are the answer

The first block with the name of a tool counts, and the text after it is left out: a model that writes on often invents the
output of its call. A fence of more than three backticks ends with as many, so that a block can hold fences.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

TOOLS = {
    "python": "```python\n(a program; it runs in the folder, and you see what it prints)\n```",
    "write": "```write PATH\n(the content of the file)\n```",
    "read": "```read PATH\n```",
    "list": "```list\n```",
    "finish": "```finish\n(your answer in a few words)\n```",
}
GROUPS = {"python": ("python",), "files": ("write", "read", "list"), "finish": ("finish",)}
_OPEN = re.compile(r"^[ \t]*(`{3,})[ \t]*(\w+)[ \t]*([^\n`]*)$", re.MULTILINE)


@dataclass(frozen=True)
class Action:
    """A call.

    argument: the rest of the first line. content: lines of the block. closed: the block has an end, which is at `end` in
    the text.
    """

    tool: str
    argument: str
    content: str
    closed: bool
    end: int


def parse_action(text: str, tools: Collection[str]) -> Action | None:
    """Return the first call of one of `tools`, or None if the text has none."""
    place = 0
    while opened := _OPEN.search(text, place):
        fence, tool, argument = opened[1], opened[2].lower(), opened[3].strip()
        close = re.compile(rf"^[ \t]*{fence}[ \t]*$", re.MULTILINE).search(text, opened.end())
        end = close.end() if close else len(text)
        if tool in tools:
            content = text[opened.end() + 1 : close.start() if close else len(text)]
            return Action(tool, argument, content, close is not None, end)
        place = end
    return None


def instructions(tools: Collection[str], steps: int) -> str:
    """Return the description of the tools for the system message."""
    shown = "\n\n".join(TOOLS[name] for name in TOOLS if name in tools)
    return (
        "You solve a task by actions in a folder of files. Each of your messages contains exactly one action, a block in "
        f"one of these forms:\n\n{shown}\n\nYou see the result of an action before you write the next message. You have "
        f"{steps} messages. The state of the folder counts at the end, so make sure that it is right before you finish."
    )
