"""Map the configured sources (known names, folders, files, globs) to an ordered list of files.

A source is read in sorted order of its relative paths, so machines with the same bytes build the same corpus. Links to
folders are not followed, since they may form cycles or leave the source; links to files are.

In globs, `*` and `?` match within one name and `**` spans folders. A pattern without a slash is matched against the
name, at any depth. Python 3.11's `PurePath.match` does not support `**`, so globs are translated to regular
expressions.

A URL is listed by fsspec in the same way.

`fingerprint` hashes this list for the ingest step's address, with the contents of local files, because modification times
change on a fresh checkout. A catalogue keeps the hashes (`provenance/hashes.py`), so a file is read once for as long as it
does not change. A plain file over the document limit that is not divided is quarantined unread, so only its size counts.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from whorl.corpus.config import IngestConfig
from whorl.corpus.links import find_links
from whorl.corpus.provenance.hashes import ContentHashes
from whorl.corpus.provenance.licences import folder_licences, nearest_licence
from whorl.data.files import compression, filesystem, format_suffix, is_url
from whorl.data.formats import format_name
from whorl.data.secrets import has_secret_name
from whorl.errors import ConfigError, DataError, one_of

# name -> (licence, its glob, description)
KNOWN_SOURCES = {
    "python-stdlib": ("PSF-2.0", "*.py", "the running interpreter's own standard library, as source")
}
# Fewer files are divided into about SPLIT_DOCUMENTS documents; of more, those over the document limit are divided.
FEW_FILES = 30
SPLIT_DOCUMENTS = 200
MIN_SPLIT_BYTES = 4000  # of a document, unless there would be fewer than MIN_SPLIT_DOCUMENTS
MIN_SPLIT_DOCUMENTS = 25
SPLIT_READ_BYTES = 8_000_000  # of a divided file are read at a time, unless its documents are larger
# Code would lose its functions.
PROSE_SUFFIXES = ("", ".txt", ".md", ".rst", ".tex", ".text", ".markdown", ".log")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of one source. `size` is in bytes; None if it is not a readable regular file."""

    source: str
    path: str  # relative to the source's root, "/" between names
    location: str  # local path or fsspec URL
    licence: str | None
    size: int | None
    modified_ns: int

    @property
    def suffix(self) -> str:
        """The suffix of the format, without that of the compression: ".jsonl" for "a.jsonl.gz"."""
        return format_suffix(self.location)


@functools.cache
def _glob_to_regex(pattern: str) -> re.Pattern[str]:
    out = []
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern):
        special = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}.get(part)
        if special is not None:
            out.append(special)
        elif len(part) > 2 and part.startswith("[") and part.endswith("]"):
            inside = part[1:-1].replace("\\", r"\\")
            out.append("[" + ("^" + inside[1:] if inside.startswith("!") else inside) + "]")
        else:
            out.append(re.escape(part))
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"invalid glob {pattern!r}: {error}", expected="a pattern like 'docs/**/*.md'"
        ) from error


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a relative path ("a/b.py") matches any of these globs."""
    name = path.rsplit("/", 1)[-1]
    return any(_glob_to_regex(p).fullmatch(path if "/" in p else name) is not None for p in patterns)


def _walk(root: Path, exclude: Sequence[str]) -> Iterator[tuple[str, Path]]:
    def refuse(error: OSError) -> None:
        raise DataError(
            f"cannot list the folder {error.filename}: {error.strerror}", do="make the folder readable"
        )

    for folder, folders, files in os.walk(root, onerror=refuse):
        below = Path(folder).relative_to(root).as_posix()
        prefix = "" if below == "." else below + "/"
        pages = {f"{Path(name).stem}_files" for name in files if name.endswith((".html", ".htm"))}  # as saved
        folders[:] = sorted(d for d in folders if d not in pages and not matches(prefix + d, exclude))
        for name in files:
            yield prefix + name, Path(folder, name)


def _split_glob(source: str) -> tuple[Path, str]:
    """Split at the first special character: 'notes/**/*.md' -> (Path('notes'), '**/*.md')."""
    parts = Path(source).parts
    first = next(i for i, part in enumerate(parts) if re.search(r"[*?\[]", part))
    return Path(*parts[:first]) if first else Path(), "/".join(parts[first:])


def _resolve_source(source: str) -> tuple[Path, list[str], list[str], str | None]:
    """Return a source's root, its globs, its excluded globs, and its licence."""
    if source in KNOWN_SOURCES:
        licence, glob, _ = KNOWN_SOURCES[source]
        root = Path(sysconfig.get_paths()["stdlib"])
        if not (root / "os.py").is_file():
            raise DataError(
                f"this interpreter has no standard library source in {root}",
                expected="a folder with os.py in it (some builds ship a zip or compiled files only)",
                do="use another Python, or another source, such as a folder of texts",
            )
        return root, [glob], ["site-packages", "dist-packages"], licence
    path = Path(source).expanduser()
    if path.is_dir():
        return path, ["*"], [], None
    if path.exists():
        return path.parent, [], [], None
    if re.search(r"[*?\[]", source):
        root, glob = _split_glob(str(path))
        if root.is_dir():
            # Matched with a slash, so that 'notes/*.md' means that folder and not any depth.
            return root, [glob if "/" in glob else "./" + glob], [], None
    raise DataError(
        _unknown_source_message(source, path), expected=_expected_sources(source), do=_suggestion(source)
    )


def _unknown_source_message(source: str, path: Path) -> str:
    return f"unknown source {source!r}: neither a known name nor a file, folder or glob ({path.absolute()})"


def _expected_sources(source: str) -> str:
    return f"{one_of(source, list(KNOWN_SOURCES))}; or the path or fsspec URL of a folder, file or glob"


def _suggestion(source: str) -> str:
    folder = Path(source).expanduser().parent
    try:
        near = difflib.get_close_matches(Path(source).name, [p.name for p in folder.iterdir()], n=3)
    except OSError:
        near = []
    hint = f"; similar: {', '.join(str(folder / n) for n in near)}" if near else ""
    return "check the spelling and the current folder" + hint


def readable_path(path: str) -> str:
    """Return a file name as text. Bytes that are not UTF-8 become backslash escapes."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def list_files(config: IngestConfig, *, may_be_empty: bool = False) -> tuple[list[SourceFile], int]:
    """Return all files of all sources in order, and the number of files excluded by the globs.

    Raises:
        DataError: a source is unknown or has no file.
    """
    unknown = sorted(set(config.licences) - set(config.sources))
    if unknown:
        raise ConfigError(
            f"licences names {unknown[0]!r}, which is not among the sources",
            expected=one_of(unknown[0], config.sources),
        )
    files: list[SourceFile] = []
    excluded_count = 0
    for source in dict.fromkeys(config.sources):
        root, globs, candidates = _candidates(source, config)
        selected = [
            file for file in candidates
            if not globs or (
                _in_source(file.path, globs)
                and matches(file.path, config.include)
                and not matches(file.path, config.exclude)
            )
        ]  # fmt: skip
        excluded_count += len(candidates) - len(selected)
        files += sorted(selected, key=lambda file: file.path)
        if not selected and not may_be_empty:
            detail = (
                f"all {len(candidates)} files in it are excluded" if candidates else "the folder is empty"
            )
            raise DataError(
                f"the source {source!r} has no files: {detail} ({root})",
                expected="at least one text, Markdown, source, JSONL, Parquet or tar file",
                do="set `sources` to another folder" + (", or widen include/exclude" if candidates else ""),
            )
    return files, excluded_count


def _candidates(source: str, config: IngestConfig) -> tuple[str, list[str], list[SourceFile]]:
    """Return a source's root, its globs (none for a single file), and all files below the root."""
    if is_url(source):
        return _url_candidates(source, config.licences.get(source))
    root, globs, never, licence = _resolve_source(source)
    licence = config.licences.get(source, licence)
    single = Path(source).expanduser()
    found = list(_walk(root, [*config.exclude, *never])) if globs else [(single.name, single)]
    licences = folder_licences(found) if licence is None else {}
    files = [
        _stat_file(source, path, location, licence or nearest_licence(path, licences))
        for path, location in found
    ]
    return str(root.absolute()), globs, files


def _url_candidates(source: str, licence: str | None) -> tuple[str, list[str], list[SourceFile]]:
    system, path = filesystem(source)
    is_glob = any(c in path for c in "*?[")
    try:
        if is_glob:
            found = system.glob(path, detail=True)
            root = re.split(r"[*?\[]", path)[0].rpartition("/")[0]
        elif system.isdir(path):
            found, root = system.find(path, detail=True), path.rstrip("/")
        else:
            found, root = {path: system.info(path)}, path.rpartition("/")[0]
    except FileNotFoundError:
        found, root = {}, path
    except OSError as error:
        raise DataError(
            f"{source} cannot be listed: {error}", do="check the address and the access"
        ) from error
    if not found and not system.exists(root):
        raise DataError(f"{source} does not exist", expected="the URL of a file, folder or glob")
    files = []
    for name, info in found.items():
        if info["type"] == "file":
            # A version for the fingerprint: remote files have no common modification time.
            version = int(hashlib.blake2b(str(system.ukey(name)).encode(), digest_size=7).hexdigest(), 16)
            relative = name.removeprefix(root).lstrip("/")
            url = system.unstrip_protocol(name)
            files.append(SourceFile(source, relative, url, licence, info["size"], version))
    return source, [] if len(found) == 1 and not is_glob and path in found else ["*"], files


def _in_source(path: str, globs: Sequence[str]) -> bool:
    # "./x" anchors a name to the source's root; "x" would match at any depth.
    return any(matches("./" + path if g.startswith("./") else path, [g]) for g in globs)


def _stat_file(source: str, path: str, location: Path, licence: str | None) -> SourceFile:
    try:
        status = location.stat()
    except OSError:
        return SourceFile(source, path, str(location), licence, None, 0)
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return SourceFile(source, path, str(location), licence, size, status.st_mtime_ns)


def with_split_size(config: IngestConfig, files: Sequence[SourceFile]) -> IngestConfig:
    """Return the configuration with `split_bytes` set, for these files.

    Few files, such as one book, would give too few documents to hold some out. A divided file may have any size.
    """
    size = config.split_bytes
    if size is None:
        total = sum(file.size or 0 for file in files)
        is_few = len(files) < FEW_FILES
        size = max(total // SPLIT_DOCUMENTS, min(MIN_SPLIT_BYTES, total // MIN_SPLIT_DOCUMENTS), 200)
        size = size if is_few else config.max_document_bytes
        size = min(size, config.max_document_bytes)
    return config.model_copy(update={"split_bytes": size})


def exceeds_limit(file: SourceFile, config: IngestConfig) -> bool:
    """Return whether a file is one plain document over the size limit, and texts are not divided."""
    is_plain = format_name(file.location, config.formats) == "text" and compression(file.location) is None
    return is_plain and not config.split_bytes and (file.size or 0) > config.max_document_bytes


def split_size(file: SourceFile, config: IngestConfig) -> int:
    """Return the bytes from which on the text of a file is divided into documents; 0: never."""
    if not config.split_bytes or format_name(file.location, config.formats) != "text":
        return 0
    return config.split_bytes if file.suffix in PROSE_SUFFIXES else config.max_document_bytes


def fingerprint(config: IngestConfig, hashes: ContentHashes | None = None) -> str:
    """Return a hash that changes with the bytes that `ingest(config)` would read (see the top of this file)."""
    files, _ = list_files(config)
    digest = hashlib.blake2b(digest_size=16)
    for file, version in zip(files, file_versions(files, config, hashes), strict=True):
        line = f"{file.source}\0{file.path}\0{file.size}\0{version}\0"
        if file.licence and file.source not in (*config.licences, *KNOWN_SOURCES):
            line += f"{file.licence}\0"  # of a licence file, which may not be among the files
        digest.update(line.encode("utf-8", "surrogateescape"))
    for link_file in find_links(config.links):
        digest.update(f"links\0{link_file.digest}\0".encode())
    return digest.hexdigest()


def file_versions(
    files: Sequence[SourceFile], config: IngestConfig, hashes: ContentHashes | None = None
) -> list[str]:
    """Return for each file a text that changes with its content: a hash, or the version of a remote file.

    Args:
        hashes: known ones; default none.
    """
    config = with_split_size(config, files)
    unread = [exceeds_limit(f, config) or has_secret_name(f.path, config.formats) for f in files]
    read = [f.size is not None and not n for f, n in zip(files, unread, strict=True)]
    local = [f.location for f, is_read in zip(files, read, strict=True) if is_read and not is_url(f.location)]
    contents = iter((hashes or ContentHashes()).of(local))
    versions = []
    for file, is_read in zip(files, read, strict=True):
        if not is_read:
            versions.append(f"unread {file.size}")
        else:
            versions.append(f"modified {file.modified_ns}" if is_url(file.location) else next(contents))
    return versions


def is_content_hash(version: str) -> bool:
    """Return whether a file's version is a hash of its content."""
    return len(version) == 32 and " " not in version
