"""The tiny checkpoint is the specification's: values of appendix B, layout and tokenizer of the release."""

import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor

from kernels.reference.quantize import dequantize_fp8_rows, dequantize_fp8_tiles, dequantize_mxfp4
from model.config import CheckpointConfig
from model.engram_map import EngramHash
from model.inventory import expected_tensors
from model.parallel import ParallelLayout
from model.tiny import Variant, cached_tiny_checkpoint, main, tiny_config, write_tiny_checkpoint
from model.tiny_weights import make_tensors, unit_values

DATA = Path(__file__).parent.parent / "data"
WEIGHT_CHECKS: dict[str, list[float]] = json.loads((DATA / "tiny_golden.json").read_text())["weight_checks"]


def read(directory: Path, name: str) -> Tensor:
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    with safe_open(directory / index["weight_map"][name], "pt") as shard:
        return shard.get_tensor(name)


def dequantized(directory: Path, name: str) -> Tensor:
    """A quantised weight's values, by whichever of the three packings it has."""
    codes, scales = read(directory, f"{name}.weight"), read(directory, f"{name}.scale").view(torch.uint8)
    if codes.dtype == torch.int8:
        return dequantize_mxfp4(codes.view(torch.uint8), scales)
    if codes.shape[0] == scales.shape[0]:
        return dequantize_fp8_rows(codes, scales)
    return dequantize_fp8_tiles(codes, scales)


def values_of_check(directory: Path, check: str) -> Tensor:
    """The tensor of a line of `weight_checks` such as `layers.0.attn.wq_a dequant [33,32:36]`."""
    name = check.partition("[")[0].strip()
    if name.endswith(" dequant"):
        return dequantized(directory, name.removesuffix(" dequant"))
    plain = name.endswith(".weight") or name.rpartition(".")[2] in ("hc_ffn_fn", "hc_ffn_scale", "attn_sink")
    return read(directory, name if plain else f"{name}.weight").to(torch.float32)


def select(values: Tensor, check: str) -> Tensor:
    """The part that a check's `[5,:8]` names; all of it without brackets."""
    _, bracket, rest = check.partition("[")
    if not bracket:
        return values
    parts = [part.split(":") for part in rest.rstrip("]").split(",")]
    index = [int(p[0]) if len(p) == 1 else slice(*(int(n) if n else None for n in p)) for p in parts]
    return values[tuple(index)]


def test_unit_values_start_with_the_golden_ones() -> None:
    golden = WEIGHT_CHECKS["raw_z embed.weight first4"]
    np.testing.assert_allclose(unit_values("embed.weight", 4), golden, rtol=5e-10)


@pytest.mark.parametrize("check", [check for check in WEIGHT_CHECKS if not check.startswith("raw_z")])
def test_weights_equal_the_golden_ones_to_the_printed_digits(tiny_checkpoint: Path, check: str) -> None:
    values = select(values_of_check(tiny_checkpoint, check), check)
    # The golden file prints ten significant digits, which is more than FP32 has.
    printed = [float(f"{value:.10g}") for value in values.tolist()]
    assert printed == WEIGHT_CHECKS[check]


@pytest.mark.parametrize("variant", get_args(Variant))
def test_every_variant_is_written_with_exactly_the_inventory(tmp_path: Path, variant: Variant) -> None:
    write_tiny_checkpoint(tmp_path, variant)
    expected = expected_tensors(CheckpointConfig.load(tmp_path / "config.json"))
    found = {}
    for path in tmp_path.glob("*.safetensors"):
        with safe_open(path, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                part = shard.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()))
    assert found == {name: (spec.dtype.value, spec.shape) for name, spec in expected.items()}


def test_engram_tables_are_alone_in_the_last_two_shards(tiny_checkpoint: Path) -> None:
    weight_map = json.loads((tiny_checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    for layer, number in ((1, 3), (4, 4)):
        shard = f"model-{number:05}-of-00004.safetensors"
        names = {name for name, file in weight_map.items() if file == shard}
        assert names == {f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale"}


def test_config_has_the_keys_of_the_release() -> None:
    released = json.loads((DATA / "released_config.json").read_text())
    assert list(tiny_config()) == list(released)
    assert list(tiny_config()["text_config"]) == list(released["text_config"])


def test_smooth_and_b_variants_share_the_weights_they_have_in_common() -> None:
    base = expected_tensors(CheckpointConfig.model_validate(tiny_config("A")))
    second_source = expected_tensors(CheckpointConfig.model_validate(tiny_config("B")))
    assert expected_tensors(CheckpointConfig.model_validate(tiny_config("A_smooth"))) == base
    assert set(base) < set(second_source)
    assert all(name.startswith("layers.9.attn.") for name in set(second_source) - set(base))


@pytest.mark.parametrize("ep_size", [1, 2, 4, 8])
def test_wide_variant_can_be_cut_over_eight_ranks(ep_size: int) -> None:
    config = CheckpointConfig.model_validate(tiny_config("wide")).text_config
    for rank in range(8):
        ParallelLayout(rank, 8, ep_size).check(config)
    assert EngramHash.from_config(config).num_columns % 8 == 0


def test_another_seed_gives_other_values_of_the_same_distribution() -> None:
    zero, one = unit_values("embed.weight", 10_000), unit_values("embed.weight", 10_000, seed=1)
    assert not np.intersect1d(zero, one).size
    assert one.mean() == pytest.approx(0, abs=0.05)
    assert one.std() == pytest.approx(1, abs=0.05)
    tensors = expected_tensors(CheckpointConfig.model_validate(tiny_config()))
    assert not torch.equal(
        make_tensors("norm.weight", tensors, 0)["norm.weight"],
        make_tensors("norm.weight", tensors, 1)["norm.weight"],
    )


def test_writing_twice_gives_the_same_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (tiny_checkpoint / path.name).read_bytes(), path.name


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        write_tiny_checkpoint(tmp_path)


def test_cache_is_written_once_and_leaves_no_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = cached_tiny_checkpoint()
    written = (directory / "config.json").stat().st_mtime_ns
    main(["--cache"])
    assert capsys.readouterr().out.strip() == str(directory)
    assert (directory / "config.json").stat().st_mtime_ns == written
    assert list((tmp_path / "hotset").iterdir()) == [directory]


def test_cache_keeps_variants_and_seeds_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (
        len({cached_tiny_checkpoint("A", 0), cached_tiny_checkpoint("A", 1), cached_tiny_checkpoint("B", 0)})
        == 3
    )


def test_cache_returns_the_folder_of_a_faster_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def write_slowly(directory: Path, variant: Variant, seed: int) -> None:
        write_tiny_checkpoint(directory, variant, seed)
        shutil.copytree(directory, tmp_path / "hotset" / directory.name)

    monkeypatch.setattr("model.tiny.write_tiny_checkpoint", write_slowly)
    directory = cached_tiny_checkpoint()
    assert list((tmp_path / "hotset").iterdir()) == [directory]


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))


def test_control_tokens_have_the_ids_of_the_config(tokenizer: Tokenizer) -> None:
    spelling = {
        0: "<｜begin▁of▁sentence｜>",
        1: "<｜end▁of▁sentence｜>",
        2: "<｜▁pad▁｜>",
        510: "<｜deepseek_image｜>",
        511: "<｜System｜>",
    }
    assert {id_: tokenizer.id_to_token(id_) for id_ in spelling} == spelling


def test_every_id_decodes_to_something(tokenizer: Tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 512
    assert all(tokenizer.decode([id_], skip_special_tokens=False) for id_ in range(512))


def test_any_text_makes_one_token_per_byte_and_returns(tokenizer: Tokenizer) -> None:
    text = "Grüße, 世界 🌍\n\t\0 <b>"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert all(3 <= id_ < 259 for id_ in ids)
    assert tokenizer.decode(ids) == text


def test_control_tokens_in_a_prompt_become_one_id_each(tokenizer: Tokenizer) -> None:
    prompt = "<｜begin▁of▁sentence｜><｜User｜>Hi<｜Assistant｜></think>"
    assert tokenizer.encode(prompt).tokens == [
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "H",
        "i",
        "<｜Assistant｜>",
        "</think>",
    ]


def test_control_tokens_in_user_text_can_be_read_as_text(tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    text = "<｜System｜>｜DSML｜</think>"
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
