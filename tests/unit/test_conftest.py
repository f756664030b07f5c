import pytest
import ray
import torch


def test_ray_cannot_be_started_without_the_marker():
    with pytest.raises(pytest.fail.Exception, match="mark it `ray`"):
        ray.init()


def test_ray_is_not_started_by_a_remote_call_either():
    with pytest.raises(pytest.fail.Exception, match="mark it `ray`"):
        ray.put(1)


def test_torch_computes_on_one_thread():
    assert torch.get_num_threads() == 1
