"""One local Ray cluster for all tests of this folder, and a tiny checkpoint."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from deployment.bundles import STRATEGY, placement_bundles
from model.tiny import write_tiny_checkpoint


@pytest.fixture(scope="package")
def cluster() -> Iterator[None]:
    """A cluster that starts fast; it counts CPUs that the machine need not have."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short_path:  # a socket's path is 107 bytes
        ray.init(
            num_cpus=32,
            include_dashboard=False,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
            _temp_dir=short_path,
        )
        yield
        ray.shutdown()


@pytest.fixture
def group(cluster: None) -> Iterator[PlacementGroup]:
    """An engine's placement group, for CPU shards."""
    group = placement_group(placement_bundles(2, "cpu"), strategy=STRATEGY)
    ray.get(group.ready())
    yield group
    remove_placement_group(group)


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of variant A, seed 0; shared, read only."""
    directory = tmp_path_factory.mktemp("tiny") / "A"
    write_tiny_checkpoint(directory, "A")
    return directory
