"""Training data of alignment: conversations, preferences and labelled completions, read, extracted or generated."""

from whorl.align.data.formats import Conversation, Preference, PromptCompletion, UnpairedPreference
from whorl.align.data.read import conversations, pairs, preferences, unpaired
from whorl.data.quarantine import Quarantine, RejectedRecord

__all__ = [
    "Conversation",
    "Preference",
    "PromptCompletion",
    "Quarantine",
    "RejectedRecord",
    "UnpairedPreference",
    "conversations",
    "pairs",
    "preferences",
    "unpaired",
]
