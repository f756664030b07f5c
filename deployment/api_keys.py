"""API keys: read from the environment or a file, never from the configuration, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Iterable, Mapping

from deployment.config import ApiConfig
from deployment.errors import SettingsError


class ApiKeys:
    """The keys that clients may use. Holds only their hashes."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    def __len__(self) -> int:
        return len(self._hashes)

    def index(self, key: str) -> int | None:
        """Which of the keys this is; None: none of them. Takes as long whichever it is."""
        hashed = _hash(key)
        found = None
        for index, accepted in enumerate(self._hashes):
            if hmac.compare_digest(hashed, accepted):
                found = index
        return found


def load_api_keys(config: ApiConfig, environment: Mapping[str, str] = os.environ) -> ApiKeys | None:
    """Read the keys from where the settings say.

    Returns: None if neither place is set.
    Raises: SettingsError naming setting and place if one is not there or has no usable key.
    """
    keys: list[str] = []
    if (name := config.api_keys_env) is not None:
        place = f"api.api_keys_env: the environment variable {name}"
        if name not in environment:
            raise SettingsError(f"{place} is not set")
        keys += _checked(place, re.split(r"[\s,]+", environment[name]))
    if (path := config.api_keys_file) is not None:
        place = f"api.api_keys_file: {path}"
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            # Without the error's text, which may quote what was read.
            raise SettingsError(f"{place} cannot be read ({type(error).__name__})") from None
        keys += _checked(place, [line.partition("#")[0].strip() for line in lines])
    if config.api_keys_env is None and config.api_keys_file is None:
        return None
    return ApiKeys(dict.fromkeys(keys))


def _checked(place: str, entries: Iterable[str]) -> list[str]:
    keys = [entry for entry in entries if entry]
    if not keys:
        raise SettingsError(f"{place} has no key")
    if any(re.search(r"[^!-~]", key) for key in keys):
        raise SettingsError(
            f"{place} has a key with other characters than printable ASCII or with a space in it"
        )
    return keys


def _hash(key: str) -> bytes:
    """Of equal length for all keys, so that a comparison tells nothing of theirs."""
    return hashlib.sha256(key.encode("utf-8", errors="surrogatepass")).digest()
