"""Token healing costs the caller nothing: tokens, log-probabilities, stop strings, context and usage."""

from __future__ import annotations

from functools import partial
from typing import Any

import openai
import pytest

LETTERS = {str(i): 50 for i in range(97, 123)}
PROMPTS = ["def ", "x = f(\n" + " " * 40, "# " + "=" * 70, "internationalization", "    self.items", "\n"]


@pytest.fixture
def complete(server: Any) -> Any:
    return partial(server.client().completions.create, model="tiny", logit_bias=LETTERS, logprobs=2)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_healed_end_is_not_counted(complete: Any, prompt: str) -> None:
    for n in (1, 4):
        whole, plain = (
            complete(prompt=prompt, max_tokens=n, extra_body={"token_healing": heal})
            for heal in (True, False)
        )
        (choice,) = whole.choices
        assert len(choice.logprobs.tokens) == n and choice.text == "".join(choice.logprobs.tokens)
        assert choice.text and choice.finish_reason == "length"
        assert whole.usage.completion_tokens == n and whole.usage.prompt_tokens == plain.usage.prompt_tokens
        *parts, last = complete(
            prompt=prompt, max_tokens=n, stream=True, stream_options={"include_usage": True}
        )
        assert sum(len(part.choices[0].logprobs.tokens) for part in parts) == n
        assert last.usage == whole.usage or last.usage.completion_tokens == n


def test_stop_string_in_healed_end_does_not_end_output(complete: Any) -> None:
    # Greedy: a draw may begin with a token of two line breaks, whose second one is the stop string.
    choice = complete(prompt="def f():\n", stop="\n", max_tokens=5, temperature=0).choices[0]
    assert len(choice.text) >= 5 and choice.finish_reason == "length"


@pytest.mark.parametrize("letter", ["a", " ", "(", "é"])
def test_context_is_checked_for_the_whole_prompt(complete: Any, letter: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(prompt=letter * 400_000)
    assert refused.value.code == "context_length_exceeded"
    assert "or more" in refused.value.message  # found without tokenizing it
