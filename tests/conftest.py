"""What holds for every test: one thread of arithmetic, and no Ray cluster unless the test asks for one."""

import os
from pathlib import Path

# Read by torch when it is first imported, here and in every process that a test starts: with one thread a sum
# has one order.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Read by Triton when it is first imported: where there is no GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read by Ray when it is first imported.
from deployment.launch import LOCAL_ENVIRONMENT

for name, value in LOCAL_ENVIRONMENT.items():
    os.environ.setdefault(name, value)

import pytest
import ray
from hypothesis import settings

# Time is no property of the code under test, and machines differ.
settings.register_profile("hotset", deadline=None)
settings.load_profile("hotset")


@pytest.fixture(autouse=True)
def forbid_ray_outside_ray_tests(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ray.init` fail in a test that does not carry the `ray` marker, however it is reached."""
    if request.node.get_closest_marker("ray"):
        return

    def refuse(*args: object, **kwargs: object) -> None:
        pytest.fail("this test starts Ray: mark it `ray`, or pass in what it takes from Ray")

    monkeypatch.setattr(ray, "init", refuse)
