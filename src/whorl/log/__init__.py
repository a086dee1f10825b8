"""The event log: topics with partitions, groups of readers, and back ends from a SQLite file to Kafka; see docs/log.md.

log = open_log("sqlite:events.db")
log.create("feedback", TopicConfig(partitions=4))
log.append("feedback", Event("feedback.given", key="ada", data={"kind": "like"}))   # returns once it is on disk
with log.group("counts", ["feedback"]) as reader:
    records = reader.read()
    reader.commit()
"""

from whorl.log.event import Event, LogRecord
from whorl.log.groups import Reader
from whorl.log.locations import default_log, open_log
from whorl.log.port import Guarantees, Log, OffsetRange, Position, TopicConfig

__all__ = [
    "Event",
    "Guarantees",
    "Log",
    "LogRecord",
    "OffsetRange",
    "Position",
    "Reader",
    "TopicConfig",
    "default_log",
    "open_log",
]
