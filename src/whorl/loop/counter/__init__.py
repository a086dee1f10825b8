"""The like counter, from a click in the log to an exact number that is read in O(1).

likes.py           membership (actor, answer) -> like or dislike, and the durable count
counts.py          reads counts, through a cache       cache.py   cells in process or in Redis
reconciliation.py  counts again from memberships       answers.py the feed, raters, clicks by day and model
warehouse.py       Parquet by date, and DuckDB over it

Four decisions carry it: a relationship is stored separately from its aggregate, counts are eventual, the log comes first,
and everything is idempotent. bench/loop/decisions.py reverses each.
"""

from whorl.loop.counter.answers import AnswersView
from whorl.loop.counter.likes import LikesView

VIEWS = (LikesView(), AnswersView())  # of `whorl loop`
