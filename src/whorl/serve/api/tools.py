"""Tool calls: forced by a grammar, or parsed from the output.

tool_choice "required" or a function name: the output is constrained to the JSON of a call, so it is a valid call for any
model. "auto": the chat template lists the tools, and the model may write calls (`tokens/chat/tool_calls.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from whorl.engine.request import Grammar
from whorl.serve.api.protocol import Tool, ToolChoice


def tool_choice_grammar(tools: Sequence[Tool], choice: str | ToolChoice | None) -> Grammar | None:
    """Return the grammar of a forced call, or None if no call is forced."""
    if isinstance(choice, ToolChoice):
        allowed = [tool for tool in tools if tool.function.name == choice.function.name]
    elif choice == "required":
        allowed = list(tools)
    else:
        return None
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in allowed
    ]
    schema = forms[0] if len(forms) == 1 else {"anyOf": forms}
    return Grammar(json_schema=orjson.dumps(schema).decode())
