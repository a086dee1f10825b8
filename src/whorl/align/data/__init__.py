"""What alignment learns from: conversations, preferences, judged answers and tasks; read, mined or generated."""

from whorl.align.data.formats import Conversation, Judged, Pair, Preference
from whorl.align.data.quarantine import Quarantine, Quarantined
from whorl.align.data.read import conversations, judged, pairs, preferences, tasks

__all__ = [
    "Conversation",
    "Judged",
    "Pair",
    "Preference",
    "Quarantine",
    "Quarantined",
    "conversations",
    "judged",
    "pairs",
    "preferences",
    "tasks",
]
