from pathlib import Path

import pytest

from deployment.config import SchedulerConfig
from deployment.errors import SettingsError
from deployment.limits import SchedulerLimits
from model.config import CheckpointConfig
from tests.unit.deployment.builders import create_limits

RELEASED_CONFIG = Path(__file__).parents[2] / "data" / "released_config.json"
MODEL = CheckpointConfig.load(RELEASED_CONFIG).text_config.model_copy(
    update={"max_position_embeddings": 4096}
)


def test_the_context_is_the_checkpoints_unless_set():
    assert SchedulerLimits.resolve(SchedulerConfig(), MODEL).max_model_len == 4096
    assert SchedulerLimits.resolve(SchedulerConfig(max_model_len=100), MODEL).max_model_len == 100


def test_a_context_that_the_checkpoint_lacks_is_refused():
    with pytest.raises(SettingsError, match=r"max_model_len is 5000.*max_position_embeddings = 4096"):
        SchedulerLimits.resolve(SchedulerConfig(max_model_len=5000), MODEL)


def test_by_default_every_slot_can_hold_a_whole_context():
    config = SchedulerConfig(max_num_seqs=3, block_size=32)
    assert SchedulerLimits.resolve(config, MODEL).num_blocks == 1 + 3 * 128


def test_blocks_that_hold_no_whole_context_are_refused():
    with pytest.raises(SettingsError, match=r"num_blocks is 4, .*max_model_len = 14 .*needs 5 blocks of 4"):
        create_limits(max_model_len=14, block_size=4, num_blocks=4)


def test_the_newest_token_needs_no_block():
    assert create_limits(max_model_len=13, block_size=4, num_blocks=4).num_blocks == 4


def test_a_shard_gets_the_history_of_the_longest_ngram():
    for ngram in (2, 4, 7):
        model = MODEL.model_copy(update={"engram_max_ngram_size": ngram})
        assert SchedulerLimits.resolve(SchedulerConfig(), model).history_len == ngram - 1
