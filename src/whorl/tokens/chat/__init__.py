"""Conversations: messages and tools to ids (`template.py`), and the text of a reply to tool calls (`tool_calls.py`).

Training, evaluation, rollouts and serving use these functions, so a model sees one format of a conversation everywhere.
"""

from whorl.tokens.chat.builtin_templates import IM_END as IM_END
from whorl.tokens.chat.builtin_templates import IM_START as IM_START
from whorl.tokens.chat.template import ChatTemplate as ChatTemplate
from whorl.tokens.chat.template import load_chat_template as load_chat_template
