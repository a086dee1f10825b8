"""Files that hold passwords and keys, by their names and their content. No model should see them."""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import translate
from pathlib import PurePosixPath

SECRET_NAMES = (
    ".env", ".env.*", "*.env", "*.pem", "*.key", "*.p12", "*.pfx", "*.ppk", "*.jks", "*.keystore", "*.kdbx", "id_rsa",
    "id_dsa", "id_ecdsa", "id_ed25519", ".netrc", "_netrc", ".npmrc", ".pypirc", ".pgpass", ".my.cnf", ".htpasswd",
    ".git-credentials", "credentials", "credentials.json", "client_secret*.json", "secrets.json", "secrets.toml",
    "secrets.yaml", "secrets.yml",
)  # fmt: skip
SECRET = re.compile("|".join(map(translate, SECRET_NAMES)))
EXAMPLES = (".example", ".sample", ".template", ".dist")  # `.env.example` holds no secret
BEGIN = re.compile(r"\s*-----BEGIN [A-Z0-9 ]*PRIVATE KEY")
END = re.compile(r"-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----\s*\Z")


def has_secret_name(path: str, wanted: Collection[str] = ()) -> bool:
    """Return whether a file's name is that of passwords or keys, and its suffix is not among the `wanted` ones."""
    name = PurePosixPath(path.lower())
    if name.suffix in EXAMPLES or name.suffix in wanted:
        return False
    return SECRET.match(name.name) is not None


def is_private_key(text: str) -> bool:
    """Return whether a text is a private key and nothing else."""
    return BEGIN.match(text) is not None and END.search(text[-100:]) is not None
