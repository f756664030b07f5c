import pytest

from deployment.serve_run import cause_of

CONSTRUCTOR = """The deployment failed to start 1 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:hotset:engine.initialize()\x1b[39m (pid=11700, ip=127.0.0.1)
    raise self._exception
RuntimeError: Traceback (most recent call last):
  File "core_actor.py", line 92, in run
    executor = start_executor(
ray.exceptions.RayTaskError(CheckpointError): \x1b[36mray::ExpertCache.load()\x1b[39m (pid=11878)
  File "checkpoint.py", line 132, in read_into
    raise CheckpointError(path, f"element {element} is {bad.meaning}", name)
model.shard_file.CheckpointError: /data/model-1.safetensors: tensor layers.3.w2.scale: the ue8m0 code of NaN
"""

SETTING = """Deploying app 'hotset' failed with exception:
RuntimeError: Traceback (most recent call last):
  File "main.py", line 792, in model_validate
pydantic_core._pydantic_core.ValidationError: 1 validation error for EngineConfig
shard.max_resident_pages
  Input should be greater than or equal to 0 [type=greater_than_equal, input_value=-4, input_type=int]
"""


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        (
            CONSTRUCTOR,
            "CheckpointError: /data/model-1.safetensors: tensor layers.3.w2.scale: the ue8m0 code of NaN",
        ),
        (
            SETTING,
            "ValidationError: 1 validation error for EngineConfig shard.max_resident_pages Input should be greater "
            "than or equal to 0 [type=greater_than_equal, input_value=-4, input_type=int]",
        ),
        ("Failed to update\nthe deployments.", "Failed to update the deployments."),
    ],
)
def test_the_cause_is_one_line(message, cause):
    assert cause_of(message) == cause
