"""What is learned, as pure functions: a summed loss, the count it is to be divided by, and metrics."""

from whorl.objectives.next_token import Loss, next_token, next_token_reference

__all__ = ["Loss", "next_token", "next_token_reference"]
