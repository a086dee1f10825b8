"""Views of the log: pure folds whose state, offsets and owner change in one transaction.

view.py      a view, its state, its effects          store.py   the tables, in SQLite or PostgreSQL
windows.py   watermarks, windows, joins              worker.py  one view as a member of a group
runner.py    all views of a process, one thread each

The vocabulary is that of Kafka Streams and of Akidau et al. 2015, "The Dataflow Model".
"""
