"""The HTTP API: request parsing, completions, chat, responses, embeddings, server-sent events."""
