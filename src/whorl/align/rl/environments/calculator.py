"""A calculator that the policy may call, in the tool format of the chat template.

    user         What is 347*58?
    assistant    <tool_call>
                 {"name": "calculator", "arguments": {"expression": "347*58"}}
                 </tool_call>
    tool         20126
    assistant    #### 20126

A reply without a call is the answer, which the task's verifier grades. A call that cannot be read is answered with an
error and counted in `malformed_calls`; the policy may try again.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Sequence
from typing import Any

from whorl.evals.episodes.environment import EnvServices, Reply, TextEnv, Turn, grade_info
from whorl.tokens.chat.tool_calls import ParsedToolCall, parse_reply
from whorl.tokens.token_encoder import Message

MAX_CHARACTERS = 200
MAX_BITS = 4096  # of an integer
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


class CalculatorEnv(TextEnv):
    """See the top of this file. describe_tools: whether the chat template lists the tool in the prompt."""

    def __init__(self, services: EnvServices, describe_tools: bool = True) -> None:
        super().__init__(services)
        self.tools = (CALCULATOR,) if describe_tools else ()

    async def step(self, messages: Sequence[Message], reply: Reply) -> Turn:
        parsed = parse_reply(reply.text)
        calls, malformed = parsed.calls, parsed.malformed
        if not calls and not malformed:
            grade = await self.services.verify(self.task, reply)
            return Turn(reward=grade.value, done=True, info=grade_info(grade))
        results = []
        for call in calls:
            try:
                results.append(calculate(_expression(call)))
            except (ValueError, ArithmeticError) as error:
                malformed += not isinstance(error, ArithmeticError)
                results.append(f"error: {error}")
        if len(results) < len(calls) or not calls:
            results.append('error: expected {"name": "calculator", "arguments": {"expression": "1+2"}}')
        counts = {"tool_calls": len(calls), "malformed_calls": malformed}
        return Turn([{"role": "tool", "content": text} for text in results], info=counts)


def _expression(call: ParsedToolCall) -> str:
    if call.name != "calculator":
        raise ValueError(f"no tool is named {call.name!r}; expected calculator"[:200])
    try:
        expression = json.loads(call.arguments)["expression"]
    except (ValueError, KeyError, TypeError):
        expression = None
    if not isinstance(expression, str):
        raise ValueError('expected the arguments {"expression": "1+2"}')
    return expression


def calculate(expression: str) -> str:
    """Return the value of an expression of numbers, + - * / // % ** and brackets.

    Raises:
        ValueError: it is no such expression. ArithmeticError: division by zero, or a value that is too large.
    """
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(
            f"the expression has {len(expression)} characters; expected at most {MAX_CHARACTERS}"
        )
    try:
        tree = ast.parse(expression.strip(), mode="eval")
        value = _value(tree.body)
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _value(node: ast.expr) -> int | float:
    result: int | float | complex
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result = value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            result = -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            result = _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _value(left), _value(right)
            if isinstance(op, ast.Pow) and abs(b) * max(1, int(abs(a)).bit_length()) > MAX_BITS:
                raise OverflowError("the result is too large")
            result = _BINARY[type(op)](a, b)
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is no arithmetic expression"[:200])
    if isinstance(result, complex):
        raise ValueError("the result is no real number")
    if isinstance(result, int) and result.bit_length() > MAX_BITS:
        raise OverflowError("the result is too large")
    return result
