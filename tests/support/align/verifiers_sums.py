"""A taskset of verifiers with an in-process harness, for the tests: sums, with a tool in some tasks. No network."""

from __future__ import annotations

import httpx
import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward()
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in (trace.assistant_messages[-1].content or ""))


class SumConfig(vf.TasksetConfig):
    n: int = 4


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self) -> list[SumTask]:
        prompts = [f"{a % 6}+{a % 6}=" for a in range(self.config.n)]
        return [SumTask(SumData(prompt=p, answer=str(2 * int(p[0]))), self.config.task) for p in prompts]


class LoopConfig(vf.HarnessConfig):
    turns: int = 2
    way: str = ""


class LoopHarness(vf.Harness[LoopConfig]):
    """Repeats the request until there are `turns` replies; `way` breaks a rule."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: vf.ModelContext, trace: vf.Trace, runtime: vf.Runtime, endpoint: str, secret: str,
        mcp_urls: dict[str, str], data: vf.TaskData,
    ) -> vf.ProgramResult:  # fmt: skip
        way, messages = self.config.way, [{"role": "user", "content": str(data.prompt)}]
        if way == "raises":
            raise KeyError("no state")
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, headers=headers) as client:
            for turn in range(self.config.turns):
                body = {"model": ctx.model, "messages": messages, "stream": way == "streams"}
                body |= {"tools": [tool]} if way == "tool" else {}
                response = await client.post(f"{endpoint}/chat/completions", json=body)
                if response.status_code != 200:
                    return vf.ProgramResult(exit_code=1, stdout="", stderr=response.text)
                message = response.json()["choices"][0]["message"]
                messages.append({k: v for k, v in message.items() if v is not None})
                for call in message.get("tool_calls") or ():
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "12"})
                if turn + 1 < self.config.turns:
                    messages.append({"role": "user", "content": "Again."})
                if way == "rewrites":
                    messages = messages[-1:]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["LoopHarness", "SumTaskset"]
