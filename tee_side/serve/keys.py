"""API keys: which clients are served, and how much of it each may have.

The file holds hashes alone, so a copy of it lets no client in:

    [keys.alice]
    sha256 = "<SHA-256 of the key, 64 hex digits>"    # tsqp api-key alice
    requests_per_minute = 60                          # these four as wished
    tokens_per_minute = 100000
    concurrent = 8
    max_tokens = 2048                                 # of one request, all its samples together

A plain hash is enough: keys are 32 random bytes, which are not guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protocol.curve import read_text, require_only_we_read
from protocol.errors import KeyFileError, expectation

log = logging.getLogger("tee_side")

PREFIX = "tsqp-"
_MAX_FILE_BYTES = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_Count = Annotated[int, Field(ge=1, le=10**9)]


class ApiKey(BaseModel):
    """One key's hash, and its limits; None: without one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: Annotated[str, Field(exclude=True)]
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    requests_per_minute: _Count | None = None
    tokens_per_minute: _Count | None = None
    concurrent: _Count | None = None
    max_tokens: _Count | None = None

    def entry(self) -> str:
        """Return the key's table in the file."""
        fields = self.model_dump(exclude_none=True) | {"sha256": f'"{self.sha256}"'}
        lines = (f"{name} = {value}" for name, value in fields.items())
        return "\n".join([f"[keys.{self.name}]", *lines, ""])


class ApiKeys:
    """The keys of a file, which can be read again while requests are served.

    Raises KeyFileError, in which nothing is quoted that could be a key: others than its owner may
    use the file, it is no TOML, a field is unknown or wrong, a name or a hash stands twice, or
    there is no key.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys = read_keys(path)

    def find(self, authorization: str | None) -> ApiKey | None:
        """Return the key that a header `Authorization: Bearer KEY` presents; None: none of ours.

        The time depends on the number of entries, not on which one it is.
        """
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        digest = hash_of(key.strip())
        found = None
        for entry in self._keys.values():
            if hmac.compare_digest(digest, entry.sha256):
                found = entry
        return found

    def of(self, name: str) -> ApiKey | None:
        """Return the key of a name; None: it was removed."""
        return self._keys.get(name)

    def reload(self) -> bool:
        """Read the file again. If it is bad, log so, keep the keys as they were, return False."""
        try:
            self._keys = read_keys(self._path)
        except KeyFileError as error:
            log.error("api_keys_unchanged", extra={"fields": {"detail": str(error)}})
            return False
        log.info("api_keys", extra={"fields": {"keys": len(self._keys)}})
        return True


def hash_of(key: str) -> str:
    """Return what the file holds of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def check_name(name: str, where: str) -> str:
    """Return a key's name. Raises KeyFileError, which does not quote it: it may be a key."""
    KeyFileError.unless(
        _NAME.fullmatch(name) and not name.startswith(PREFIX),
        f"{where}: name of a key",
        f"{len(name)} characters",
        f"1 to 32 of A-Z, a-z, 0-9, - and _, not {PREFIX} in front",
    )
    return name


def read_keys(path: Path) -> Mapping[str, ApiKey]:
    """Read a key file: keys by their names. Raises KeyFileError as `ApiKeys`."""
    where = str(path)
    text, status = read_text(path, _MAX_FILE_BYTES)
    require_only_we_read(path, status)
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # Its own message may quote the file.
        place = re.search(r"\(at [a-z0-9 ,]+\)$", str(error))
        got = f"invalid TOML {place[0] if place else ''}".rstrip()
        raise KeyFileError(where, got=got, expected="TOML, each name once") from None
    entries = tables.pop("keys", None)
    if tables or not isinstance(entries, dict) or not entries:
        got = "other keys or tables" if tables else "no key"
        raise KeyFileError(where, got=got, expected="a table [keys.NAME] for each key")
    keys: dict[str, ApiKey] = {}
    names: dict[str, str] = {}
    for name, fields in entries.items():
        keys[name] = key = _key(check_name(name, where), fields, f"{where}: {name}")
        other = names.setdefault(key.sha256, name)
        got = f"the key of {other}"
        KeyFileError.unless(other == name, f"{where}: {name}: sha256", got, "a key of its own")
    return keys


def _key(name: str, fields: Any, where: str) -> ApiKey:
    known = [field for field in ApiKey.model_fields if field != "name"]
    if not isinstance(fields, dict) or not fields.keys() <= set(known):
        raise KeyFileError(where, got="an unknown field", expected=f"a table of {', '.join(known)}")
    try:
        return ApiKey(name=name, **fields)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        field = str(fault["loc"][0])
        raise KeyFileError(
            f"{where}: {field}",
            got="nothing" if fault["type"] == "missing" else "another value",
            expected="the 64 hex digits of the key's SHA-256 (tsqp api-key)"
            if field == "sha256"
            else expectation(fault["type"], fault["msg"]),
        ) from None
