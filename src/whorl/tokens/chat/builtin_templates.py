"""Chat templates of models that bring none: ChatML for a vocabulary with its markers, a transcript for a base model."""

from __future__ import annotations

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

TOOLS_HEAD = "You may call functions. Their signatures, as JSON schemas:\n<tools>\n"
TOOLS_END = """</tools>
To call one, write its name and arguments as one JSON object between tags, and nothing after it:
<tool_call>
{"name": "the function's name", "arguments": {"argument": "value"}}
</tool_call>"""
TOOLS = TOOLS_HEAD + "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}" + TOOLS_END

CHATML = (
    """\
{%- set ns = namespace(rest=messages) -%}
{{- bos_token -}}
{%- if tools -%}
<|im_start|>system
{% if messages[0].role in ("system", "developer") %}{{ messages[0].content }}
{% set ns.rest = messages[1:] %}
{% endif %}"""
    + TOOLS
    + """<|im_end|>
{% endif -%}
{%- for m in ns.rest -%}
<|im_start|>{{ m.role }}
{{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}"""
)

TRANSCRIPT = (
    """\
{{- bos_token -}}
{%- if tools -%}"""
    + TOOLS
    + """

{% endif -%}
{%- for m in messages -%}
{%- if m.role in ("system", "developer") -%}{{ m.content }}
{%- else -%}{{ m.role | capitalize }}: {{ m.content or "" }}
{%- for call in m.tool_calls or [] %}
<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor -%}
{%- endif %}


{% endfor -%}
{%- if add_generation_prompt -%}Assistant:{%- endif -%}"""
)
TRANSCRIPT_STOPS = (b"\n\nUser:", b"\n\nSystem:", b"\n\nAssistant:", b"\n\nTool:")
