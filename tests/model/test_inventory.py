"""The inventory reproduces the released counts and sizes (spec section 11) from the released config.json."""

import re
from collections import Counter
from pathlib import Path

import pytest

from model.config import CheckpointConfig
from model.inventory import StoredDtype, TensorSpec, expected_tensors

RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "released_config.json"


@pytest.fixture(scope="module")
def released() -> dict[str, TensorSpec]:
    return expected_tensors(CheckpointConfig.load(RELEASED_CONFIG))


def count_and_bytes(tensors: dict[str, TensorSpec], pattern: str) -> tuple[int, int]:
    chosen = [spec for name, spec in tensors.items() if re.fullmatch(pattern, name)]
    return len(chosen), sum(spec.num_bytes for spec in chosen)


def test_released_checkpoint_has_96085_tensors_of_510286023000_bytes(released: dict[str, TensorSpec]) -> None:
    assert count_and_bytes(released, ".*") == (96_085, 510_286_023_000)


@pytest.mark.parametrize(
    ("pattern", "num_tensors", "num_bytes"),
    [
        (r"layers\.\d+\.ffn\.experts\..*", 92_160, 288_777_830_400),
        (r"layers\.\d+\.ffn\.shared_experts\..*", 240, 1_416_960_000),
        (r"layers\.\d+\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|q_norm|kv_norm|attn_sink).*", 520, 5_069_721_600),
        (r"layers\.\d+\.attn\.indexer\..*", 32, 45_130_752),
        (r"layers\.\d+\.attn\.compressor\..*", 11, 36_704_256),
        (r"layers\.\d+\.ffn\.gate\..*", 120, 157_409_280),
        (r"layers\.\d+\.hc_.*", 240, 157_295_040),
        (r"layers\.\d+\.(attn|ffn)_norm\.weight", 80, 819_200),
        (r"layers\.\d+\.engram\.(q_weight|k_weight|wkv\..*)", 8, 315_043_840),
        (r"layers\.\d+\.engram\.embed\..*", 4, 202_758_032_400),
        (r"embed\.weight|head\.weight", 2, 2 * 1_323_827_200),
        (r"norm\.weight", 1, 10_240),
        (r"mtp\.\d\.ffn\.experts\..*", 2_304, 7_219_445_760),
        (r"mtp\.\d\.(?!ffn\.experts\.).*", 97, 713_428_872),
        (r"mtp\.0\..*", 801, 2_652_643_800),
        (r"mtp\.1\..*", 798, 2_573_913_560),
        (r"mtp\.2\..*", 802, 2_706_317_272),
        (r"(vision|aligner|image_).*", 266, 970_536_960),
    ],
)
def test_released_group_has_its_count_and_bytes(
    released: dict[str, TensorSpec], pattern: str, num_tensors: int, num_bytes: int
) -> None:
    assert count_and_bytes(released, pattern) == (num_tensors, num_bytes)


def test_plain_layer_has_thirty_tensors_besides_its_experts(released: dict[str, TensorSpec]) -> None:
    plain = [name for name in released if name.startswith("layers.3.") and ".experts." not in name]
    assert len(plain) == 30


def test_only_ratio_two_kv_sources_have_a_compressor_gate(released: dict[str, TensorSpec]) -> None:
    layers = {name.split(".")[1] for name in released if name.endswith("compressor.wgate.weight")}
    assert layers == {"2", "8", "14"}


def test_every_quantised_weight_has_a_scale_and_no_other_tensor_has_one(
    released: dict[str, TensorSpec],
) -> None:
    quantised = {
        name for name, spec in released.items() if spec.dtype in (StoredDtype.F8_E4M3, StoredDtype.I8)
    }
    scales = {name for name, spec in released.items() if spec.dtype is StoredDtype.F8_E8M0}
    assert scales == {name.removesuffix(".weight") + ".scale" for name in quantised}


def test_vision_tensors_are_expected_only_with_a_vision_config(released: dict[str, TensorSpec]) -> None:
    config = CheckpointConfig.load(RELEASED_CONFIG).model_copy(update={"vision_config": None})
    text_only = expected_tensors(config)
    vision = {name for name in released if name.startswith(("vision.", "aligner.", "image_"))}
    assert vision
    assert set(released) - set(text_only) == vision


def test_released_dtypes_are_the_five_of_the_specification(released: dict[str, TensorSpec]) -> None:
    assert set(Counter(spec.dtype for spec in released.values())) == set(StoredDtype)
