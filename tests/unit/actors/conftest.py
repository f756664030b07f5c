"""A tiny checkpoint, written once a session."""

from pathlib import Path

import pytest

from model.tiny import write_tiny_checkpoint


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of variant A, seed 0; shared, read only."""
    directory = tmp_path_factory.mktemp("tiny") / "A"
    write_tiny_checkpoint(directory, "A")
    return directory
