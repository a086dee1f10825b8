"""Search indexes as views of the log.

settings.py    source and columns of an index          documents.py     the fold: records -> documents
passages.py    passages, vectors, language             indexer.py       the fold's rows, then the index
reader.py      an index as its readers see it          own_indexes.py   corpus, runs, responses
"""
