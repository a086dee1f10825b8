"""The events of a served model, and the views of them; see docs/loop.md."""
