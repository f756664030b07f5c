"""Tiny checkpoints, written once a session."""

from pathlib import Path

import pytest

from model.tiny import Variant, write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of variant A, seed 0. Shared: a test that changes files copies it first."""
    directory = tmp_path_factory.mktemp("tiny") / "A"
    write_tiny_checkpoint(directory, "A")
    return directory


class TinyCheckpoints(dict[str, Path]):
    """Folders by variant, seed 0, written when first asked for."""

    def __init__(self, directory: Path, written: dict[str, Path]) -> None:
        super().__init__(written)
        self._directory = directory

    def __missing__(self, variant: Variant) -> Path:
        self[variant] = self._directory / variant
        write_tiny_checkpoint(self[variant], variant)
        return self[variant]


@pytest.fixture(scope="session")
def tiny_checkpoints(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all variants, seed 0. Shared, read only."""
    return TinyCheckpoints(tmp_path_factory.mktemp("tiny"), {"A": tiny_checkpoint})
