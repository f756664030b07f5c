"""Tiny checkpoints, written once a session."""

from pathlib import Path

import pytest

from model.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of variant A, seed 0. Shared: a test that changes files copies it first."""
    directory = tmp_path_factory.mktemp("tiny") / "A"
    write_tiny_checkpoint(directory, "A")
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoints(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of all variants, seed 0. Shared, read only."""
    folders = {"A": tiny_checkpoint}
    for variant in ("A_smooth", "B", "wide"):
        folders[variant] = tmp_path_factory.mktemp("tiny") / variant
        write_tiny_checkpoint(folders[variant], variant)
    return folders
