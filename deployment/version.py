"""The engine's version. `pyproject.toml` takes it from here."""

from typing import Final

VERSION: Final = "0.1.0"
