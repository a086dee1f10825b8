"""The event log: topics with partitions, groups of readers, and back ends from a SQLite file to Kafka; see docs/log.md.

log = open_log("sqlite:events.db")
log.create("feedback", TopicConfig(partitions=4))
log.append("feedback", Event("feedback.given", key="ada", data={"kind": "like"}))   # returns once it is on disk
with log.group("counts", ["feedback"]) as reader:
    records = reader.read()
    reader.commit()
"""

from whorl.log.event import Event, Record
from whorl.log.groups import Reader
from whorl.log.locations import default_log, open_log
from whorl.log.port import Bounds, Guarantees, Log, Position, TopicConfig

__all__ = [
    "Bounds",
    "Event",
    "Guarantees",
    "Log",
    "Position",
    "Reader",
    "Record",
    "TopicConfig",
    "default_log",
    "open_log",
]
