"""Who may call: named API keys from a file, one from `--api-key`, or everybody.

The file is TOML, one table for each name:

    [keys.alice]
    sha256 = "5e88…"              # of the key's text: printf %s "$KEY" | sha256sum
    requests_per_minute = 60      # this and all below are optional; 0 is no limit
    tokens_per_minute = 100_000
    concurrent_requests = 8
    admin = false                 # true: may also see and drain workers

`sha256` may be a list, so that an old and a new key are both valid while clients change over; `key`
instead of `sha256` gives keys in plain text. SIGHUP reads the file again. A file with a mistake
changes nothing then, and prevents the start otherwise.

Only digests are kept. A given key is compared with all of them, each in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pageferry.gateway.errors import ApiError
from pageferry.gateway.rate_limits import LIMIT_NAMES, Limits, Tenant

SINGLE = "default"
"""Name of the key that `--api-key` gives."""
MAX_KEYS = 10_000
"""Digests; comparing with that many takes 1 ms."""
MAX_FILE_BYTES = 8 * 2**20

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_KEY = re.compile(r"[!-~]{1,256}")


class KeysError(ValueError):
    """The keys cannot be used. The text names the place, never a key."""


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class KeyRing:
    """The keys that are valid now."""

    def __init__(self, single: str = "", file: Path | None = None) -> None:
        """Raises `KeysError`."""
        self._single = single
        self._file = file
        self._anyone = Tenant("", Limits(), admin=True)
        self._tenants: dict[str, Tenant] = {}
        self._digests: list[tuple[bytes, Tenant]] = []
        self.load()

    @property
    def required(self) -> bool:
        return bool(self._single) or self._file is not None

    def load(self) -> None:
        """Read the file (again). `KeysError` leaves everything as it is.

        A tenant that stays keeps what it has used; calls of one that is gone run to their end.
        """
        entries = {} if self._file is None else read_keys(self._file)
        if self._single:
            if not _KEY.fullmatch(self._single):
                raise KeysError("--api-key must be 1 to 256 printable ASCII characters, no spaces")
            if SINGLE in entries:
                raise KeysError(f"the keys file names {SINGLE!r}, which is --api-key's name")
            entries[SINGLE] = Entry([digest(self._single)], Limits(), True)
        tenants = {
            name: self._tenants.get(name) or Tenant(name, entry.limits)
            for name, entry in entries.items()
        }
        for name, entry in entries.items():
            tenants[name].change(entry.limits, entry.admin)
        self._tenants = tenants
        self._digests = [(d, tenants[n]) for n, entry in entries.items() for d in entry.digests]

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, authorization: Sequence[str]) -> Tenant:
        """Whose key these Authorization headers carry; `ApiError` 401 if it is nobody's."""
        if not self.required:
            return self._anyone
        if len(authorization) != 1:
            raise unauthorized("You did not provide an API key. Send it as a Bearer token.")
        scheme, _, key = authorization[0].partition(" ")
        if scheme.lower() != "bearer":
            raise unauthorized("The Authorization header must be 'Bearer ' and an API key.")
        given = digest(key.strip())
        found: Tenant | None = None
        for known, tenant in self._digests:
            if hmac.compare_digest(known, given):
                found = tenant
        if found is None:
            raise unauthorized("Incorrect API key provided.")
        return found


def unauthorized(text: str) -> ApiError:
    return ApiError(401, text, "invalid_request_error", "invalid_api_key")


@dataclass(frozen=True)
class Entry:
    """One table of the file."""

    digests: list[bytes]
    limits: Limits
    admin: bool


def read_keys(file: Path) -> dict[str, Entry]:
    """The tables of a keys file by name. Raises `KeysError`."""
    try:
        with file.open("rb") as source:
            data = source.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise KeysError(f"{file} is larger than {MAX_FILE_BYTES} bytes")
        value = tomllib.loads(data.decode())
    except OSError as error:
        raise KeysError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeysError(f"{file} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise KeysError(f"{file} is not TOML: {error}") from None
    tables = value.get("keys")
    if set(value) != {"keys"} or not isinstance(tables, dict) or not tables:
        raise KeysError(f"{file} must have tables [keys.NAME], at least one, and nothing else")
    entries = {
        name: _entry(f"{file}: [keys.{name}]", name, table) for name, table in tables.items()
    }
    digests = [d for entry in entries.values() for d in entry.digests]
    if len(set(digests)) != len(digests):
        raise KeysError(f"{file} has the same key twice")
    if len(digests) > MAX_KEYS:
        raise KeysError(f"{file} has {len(digests)} keys; at most {MAX_KEYS} are accepted")
    return entries


def _entry(where: str, name: str, table: Any) -> Entry:
    if not _NAME.fullmatch(name):
        raise KeysError(f"{where}: names are 1 to 64 letters, digits and . _ @ -")
    if not isinstance(table, Mapping):
        raise KeysError(f"{where} must be a table")
    if unknown := sorted(set(table) - {"sha256", "key", "admin", *LIMIT_NAMES}):
        raise KeysError(f"{where} has an unknown field {unknown[0]!r}")
    admin = table.get("admin", False)
    if not isinstance(admin, bool):
        raise KeysError(f"{where}: admin must be true or false")
    limits = {}
    for limit in LIMIT_NAMES:
        number = table.get(limit, 0)
        if type(number) is not int or not 0 <= number < 2**53:
            raise KeysError(f"{where}: {limit} must be a whole number from 0")
        limits[limit] = number
    return Entry(_digests(where, table), Limits(**limits), admin)


def _digests(where: str, table: Mapping[str, Any]) -> list[bytes]:
    if ("key" in table) == ("sha256" in table):
        raise KeysError(f"{where} needs either sha256 or key")
    plain = "key" in table
    given = table["key"] if plain else table["sha256"]
    values = given if isinstance(given, list) else [given]
    form, shown = (_KEY, "1 to 256 printable ASCII characters, no spaces")
    if not plain:
        form, shown = (_DIGEST, "64 hexadecimal digits")
    if not values or not all(isinstance(v, str) and form.fullmatch(v) for v in values):
        raise KeysError(
            f"{where}: {'key' if plain else 'sha256'} must be {shown}, or a list of such"
        )
    return [digest(v) if plain else bytes.fromhex(v) for v in values]
