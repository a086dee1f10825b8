"""`Posts.xml` of a Stack Exchange dump: a question and its answers, best score first, as one record.

    {"text": "TITLE\\n\\nQUESTION\\n\\nANSWER...", "url": "/questions/4", "title": "TITLE", "time": "2026-...",
     "licence": "CC-BY-SA-4.0", "media_type": "text/html"}

The file does not name its site, so the address is relative to it. The licence is that of the posts, as an SPDX
expression. Bodies are HTML; all their text is kept (`data/extraction/html.py`).

Answers are stored long after their question. Memory is bounded by sorting on disk: the posts go to a temporary SQLite
file, which SQLite sorts by question and score in runs of a few MB. The space needed is two to three times that of the
decompressed file, in the folder for temporary files.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
import tempfile
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from whorl.data.extraction import extract_html, run_bounded
from whorl.data.files import open_decompressed
from whorl.data.formats.dump import Element, elements
from whorl.data.formats.format import Format, Record
from whorl.data.quarantine import BadRecordError
from whorl.errors import DataError

QUESTION, ANSWER = "1", "2"  # PostTypeId; the others are pages of help and of tags
PRAGMAS = "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA temp_store=FILE"
NONE = -(1 << 62)  # question of a row without numbers
TABLE = "CREATE TABLE posts (question, answer, score, id, offset, stop, title, time, licence, body)"
SORTED = "SELECT * FROM posts ORDER BY question, answer, score DESC, id"
Post = tuple[int, int, int, int, int, int, str, str, str, str]  # the columns of TABLE; answer: 0 or 1


class StackExchange(Format):
    """See the top of this file."""

    extracts = True

    def read(self, uri: str, start: int, stop: int | None) -> Iterator[Record]:
        if start:
            return
        with tempfile.TemporaryDirectory(prefix="whorl-posts-") as folder:
            database = sqlite3.connect(Path(folder) / "posts.sqlite")
            try:
                database.executescript(f"{PRAGMAS}; {TABLE}")
                damage = self._store(uri, database)
                yield from self._records(database)
            except sqlite3.OperationalError as error:
                raise DataError(
                    f"the posts of {uri} cannot be sorted in {folder}: {error}",
                    expected="space of two to three times the decompressed file",
                    do="set TMPDIR to a folder on a larger disk",
                ) from error
            finally:
                database.close()
        if damage is not None:
            raise damage

    def _store(self, uri: str, database: sqlite3.Connection) -> OSError | ValueError | None:
        """Store the posts; return the error that ended the file early, if any."""
        try:
            with open_decompressed(uri) as stream:
                rows = elements(stream, ("row",), self.longest)
                posts = (post for row in rows if (post := _post(row)) is not None)
                database.executemany(f"INSERT INTO posts VALUES ({', '.join('?' * 10)})", posts)
        except (OSError, ValueError) as error:
            return error
        finally:
            database.commit()
        return None

    def _records(self, database: sqlite3.Connection) -> Iterator[Record]:
        number = 0
        posts: Iterator[Post] = database.execute(SORTED)
        for question, group in itertools.groupby(posts, itemgetter(0)):
            first = next(group)
            thread = itertools.chain([first], group)  # noqa: B031 - without what next() took
            if question == NONE or first[1]:  # bad rows; answers without their question
                for post in thread:
                    number += 1
                    yield Record(number, post[4], post[5] - post[4], _rejection(post), post[5])
            else:
                number += 1
                value = self._thread(thread)
                yield Record(number, first[4], first[5] - first[4], value, first[5])

    def _thread(self, posts: Iterator[Post]) -> dict[str, Any] | BadRecordError:
        """Return the fields of a question and its answers."""
        question = next(posts)
        title, time = question[6:8]
        bodies, licences, size = list[str](), set(), 0
        for post in itertools.chain([question], posts):
            *_, licence, body = post
            size += len(body)
            if size > self.longest:
                return BadRecordError(
                    "too_large", "", f"a question with answers of over {self.longest} characters"
                )
            bodies.append(body)
            licences |= {licence} - {""}
        try:
            texts = [title, *run_bounded(_texts, bodies, n_bytes=size)]
        except BadRecordError as error:
            return error
        return {
            self.text_field: "\n\n".join(filter(None, texts)),
            "url": f"/questions/{question[0]}",
            "title": title or None,
            "time": time or None,
            "licence": " AND ".join(sorted(licences)) or None,
            "media_type": "text/html",
        }


def _texts(bodies: list[str]) -> list[str]:
    return [extract_html(body, main_content=False).text.strip() for body in bodies]


def _post(row: Element) -> Post | None:
    """Return a row of the table, or None for a post that is neither a question nor an answer."""
    get = row.attributes.get
    kind = get("PostTypeId")
    if kind not in (QUESTION, ANSWER) and kind is not None:
        return None
    is_answer = kind == ANSWER
    numbers = [_number(get(name)) for name in ("Id", "ParentId" if is_answer else "Id", "Score")]
    if kind is None or numbers[0] is None or numbers[1] is None:
        detail = "a post without a number of its own, of its type or of its question"
        return NONE, 0, 0, 0, row.offset, row.end, "", "", "", detail
    licence = "-".join(get("ContentLicense", "").split())
    # "CC BY-SA 4.0" is "CC-BY-SA-4.0" in SPDX.
    return (
        numbers[1], int(is_answer), numbers[2] or 0, numbers[0], row.offset, row.end,
        get("Title", ""), get("CreationDate", ""), licence, get("Body", ""),
    )  # fmt: skip


def _number(text: str | None) -> int | None:
    if text is None or re.fullmatch("-?[0-9]{1,18}", text) is None:
        return None
    return int(text)


def _rejection(post: Post) -> BadRecordError:
    if post[0] == NONE:
        return BadRecordError("bad_field", "Id", post[9])
    return BadRecordError("no_question", "ParentId", f"question {post[0]} is not in the file")
