"""A checkpoint opens only if it is complete and right, and every read returns exactly the stored values."""

import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from model.checkpoint import TORCH_DTYPES, Checkpoint
from model.checkpoint_layout import canonical_name
from model.config import CheckpointConfig
from model.inventory import TensorSpec, expected_tensors
from model.shard_file import CheckpointError
from model.tiny import Variant, write_tiny_checkpoint

INDEX = "model.safetensors.index.json"
RELEASED_CONFIG = Path(__file__).parent.parent / "data" / "released_config.json"
EXPERT = "layers.3.ffn.experts.2.w2"
"""An expert's matrix: packed codes `[256, 64]`, scales `[256, 4]`."""
TABLE = "layers.4.engram.embed"
"""An Engram table, in the last shard: codes `[864, 32]`, scales `[864, 1]`."""
ONE_OF_EACH_DTYPE = [
    f"{EXPERT}.weight",
    f"{EXPERT}.scale",
    f"{TABLE}.weight",
    "embed.weight",
    "norm.weight",
    "layers.0.hc_attn_fn",
    "layers.0.attn.attn_sink",
]


@dataclass
class Stored:
    """One tensor of a shard under change."""

    dtype: str
    shape: list[int]
    data: bytes


class EditableCheckpoint:
    """A copy of a checkpoint whose files can be taken apart and written again."""

    def __init__(self, source: Path, directory: Path) -> None:
        self.directory = directory
        # Hard links, as only a few files change; `replace` never writes through one.
        shutil.copytree(source, directory, copy_function=os.link)

    def replace(self, name: str, content: bytes) -> None:
        path = self.directory / name
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def edit_json(self, name: str, edit: Callable[[Any], None]) -> None:
        content = json.loads((self.directory / name).read_bytes())
        edit(content)
        self.replace(name, json.dumps(content).encode())

    def shard_of(self, tensor: str) -> str:
        weight_map: dict[str, str] = json.loads((self.directory / INDEX).read_bytes())["weight_map"]
        return weight_map[tensor]

    def edit_header(self, shard: str, edit: Callable[[Any], None]) -> None:
        header, data = self._split(shard)
        content = json.loads(header)
        edit(content)
        self.replace(shard, join(json.dumps(content).encode(), data))

    def edit_tensors(self, shard: str, edit: Callable[[dict[str, Stored]], None]) -> None:
        """Take a shard apart, let `edit` change the tensors, and write it with fitting offsets and index."""
        header, data = self._split(shard)
        tensors = {
            name: Stored(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
            for name, entry in json.loads(header).items()
            if name != "__metadata__"
        }
        edit(tensors)
        self.replace(shard, pack(tensors))

        def rename(index: Any) -> None:
            others = {name: file for name, file in index["weight_map"].items() if file != shard}
            index["weight_map"] = others | dict.fromkeys(tensors, shard)

        self.edit_json(INDEX, rename)

    def set_bytes(self, tensor: str, offset: int, content: bytes) -> None:
        """Overwrite bytes of a tensor's data."""

        def edit(tensors: dict[str, Stored]) -> None:
            data = bytearray(tensors[tensor].data)
            data[offset : offset + len(content)] = content
            tensors[tensor].data = bytes(data)

        self.edit_tensors(self.shard_of(tensor), edit)

    def _split(self, shard: str) -> tuple[bytes, bytes]:
        content = (self.directory / shard).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        return content[8:end], content[end:]


def join(header: bytes, data: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def pack(tensors: dict[str, Stored]) -> bytes:
    header, end = {}, 0
    for name, stored in tensors.items():
        offsets = [end, end + len(stored.data)]
        header[name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": offsets}
        end = offsets[1]
    return join(json.dumps(header).encode(), b"".join(stored.data for stored in tensors.values()))


@pytest.fixture
def editable(tiny_checkpoint: Path, tmp_path: Path) -> EditableCheckpoint:
    return EditableCheckpoint(tiny_checkpoint, tmp_path / "edited")


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: Path) -> Checkpoint:
    return Checkpoint.open(tiny_checkpoint)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(as_bytes(x), as_bytes(y))


def assert_refused(directory: Path, file: str, tensor: str | None, problem: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(directory)
    error = refusal.value
    assert (error.path.name, error.tensor) == (file, tensor), str(error)
    assert problem in error.problem
    assert file in str(error)
    assert tensor is None or tensor in str(error)


class TestReading:
    @pytest.mark.parametrize("variant", get_args(Variant))
    def test_every_variant_opens_with_exactly_its_inventory(self, tmp_path: Path, variant: Variant) -> None:
        write_tiny_checkpoint(tmp_path, variant)
        checkpoint = Checkpoint.open(tmp_path)
        expected = expected_tensors(checkpoint.config)
        assert {name: checkpoint.spec(name) for name in checkpoint.names} == expected
        assert checkpoint.names == tuple(expected)

    def test_every_tensor_equals_what_the_safetensors_library_reads(
        self, tiny_checkpoint: Path, checkpoint: Checkpoint
    ) -> None:
        for path in tiny_checkpoint.glob("*.safetensors"):
            with safe_open(path, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                    stored = shard.get_tensor(name)
                    read = checkpoint.read(name)
                    assert read.dtype == TORCH_DTYPES[checkpoint.spec(name).dtype]
                    assert read.shape == stored.shape
                    assert torch.equal(as_bytes(read), as_bytes(stored)), name

    @given(data=st.data())
    def test_any_part_equals_that_part_of_the_whole(
        self, checkpoint: Checkpoint, data: st.DataObject
    ) -> None:
        name = data.draw(st.sampled_from(ONE_OF_EACH_DTYPE))
        whole = checkpoint.read(name)

        def draw_part(size: int) -> slice | None:
            start = data.draw(st.integers(0, size))
            return data.draw(st.sampled_from([None, slice(start, data.draw(st.integers(start, size)))]))

        rows = draw_part(whole.shape[0])
        columns = draw_part(whole.shape[1]) if whole.dim() == 2 else None
        expected = whole[rows or slice(None)]
        if columns is not None:
            expected = expected[:, columns]
        part = checkpoint.read(name, rows, columns)
        assert part.shape == expected.shape
        assert part.is_contiguous()
        assert same_bits(part, expected)

    @pytest.mark.parametrize(
        ("name", "rows", "columns"),
        [
            ("embed.weight", slice(0, 513), None),
            ("embed.weight", slice(-1, None), None),
            ("embed.weight", slice(5, 4), None),
            ("embed.weight", slice(0, 4, 2), None),
            ("embed.weight", None, slice(0, 257)),
            ("norm.weight", None, slice(0, 1)),
        ],
    )
    def test_part_that_leaves_the_tensor_is_refused(
        self, checkpoint: Checkpoint, name: str, rows: slice | None, columns: slice | None
    ) -> None:
        with pytest.raises(ValueError, match=name):
            checkpoint.read(name, rows, columns)

    def test_read_tensor_owns_its_memory(self, checkpoint: Checkpoint) -> None:
        first = checkpoint.read("norm.weight")
        first.zero_()
        assert bool(checkpoint.read("norm.weight").any())

    def test_part_can_be_read_into_a_page(self, checkpoint: Checkpoint) -> None:
        page = torch.zeros(100_000, dtype=torch.uint8)
        section = page[100 : 100 + 256 * 16].view(256, 16)
        checkpoint.read_into(section, f"{EXPERT}.weight", columns=slice(16, 32))
        assert torch.equal(section, checkpoint.read(f"{EXPERT}.weight")[:, 16:32])
        assert not page[:100].any()
        assert not page[100 + 256 * 16 :].any()

    @pytest.mark.parametrize("name", ONE_OF_EACH_DTYPE)
    def test_location_names_the_bytes_of_the_tensor(self, checkpoint: Checkpoint, name: str) -> None:
        path, offset, num_bytes = checkpoint.location(name)
        stored = np.frombuffer(path.read_bytes()[offset : offset + num_bytes], np.uint8)
        assert torch.equal(as_bytes(checkpoint.read(name)).flatten(), torch.from_numpy(stored.copy()))

    def test_threads_read_the_same_as_one(self, checkpoint: Checkpoint) -> None:
        names = list(checkpoint.names)
        with ThreadPoolExecutor(4) as pool:
            for name, read in zip(names, pool.map(checkpoint.read, names), strict=True):
                assert same_bits(read, checkpoint.read(name)), name

    def test_opening_reads_no_tensor(self, editable: EditableCheckpoint) -> None:
        editable.set_bytes(f"{EXPERT}.scale", 5, b"\xff")
        Checkpoint.open(editable.directory)


class TestNames:
    @pytest.mark.parametrize(
        ("alias", "name"),
        [
            ("model.embed.weight", "embed.weight"),
            ("model.layers.3.self_attn.wq_a.weight_scale_inv", "layers.3.attn.wq_a.scale"),
            ("layers.3.mlp.experts.7.w1.weight", "layers.3.ffn.experts.7.w1.weight"),
            ("layers.3.mlp.gate.e_score_correction_bias", "layers.3.ffn.gate.bias"),
            ("layers.3.mlp.gate.e_score_correction_bias_vl", "layers.3.ffn.gate.bias_vl"),
            ("model.vision.blocks.0.mlp.w1.weight", "vision.blocks.0.mlp.w1.weight"),
            ("layers.3.attn.wq_a.scale", "layers.3.attn.wq_a.scale"),
        ],
    )
    def test_alias_of_the_official_converter_has_a_canonical_name(self, alias: str, name: str) -> None:
        assert canonical_name(alias) == name

    def test_checkpoint_of_aliases_reads_by_canonical_names(
        self, editable: EditableCheckpoint, checkpoint: Checkpoint
    ) -> None:
        def spell_otherwise(tensors: dict[str, Stored]) -> None:
            for name in list(tensors):
                alias = name.replace(".attn.", ".self_attn.").replace(".ffn.", ".mlp.")
                alias = alias.replace(".scale", ".weight_scale_inv").replace(
                    "gate.bias", "gate.e_score_correction_bias"
                )
                tensors[f"model.{alias}"] = tensors.pop(name)

        for shard in sorted(path.name for path in editable.directory.glob("*.safetensors")):
            editable.edit_tensors(shard, spell_otherwise)
        renamed = Checkpoint.open(editable.directory)
        assert renamed.names == checkpoint.names
        assert all(same_bits(renamed.read(name), checkpoint.read(name)) for name in ONE_OF_EACH_DTYPE)

    def test_embedding_and_head_of_a_draft_stage_are_ignored(self, editable: EditableCheckpoint) -> None:
        def add(tensors: dict[str, Stored]) -> None:
            for name in ("mtp.0.embed.weight", "mtp.2.head.weight"):
                tensors[name] = tensors["embed.weight"]

        editable.edit_tensors(editable.shard_of("embed.weight"), add)
        assert "mtp.0.embed.weight" not in Checkpoint.open(editable.directory).names

    def test_same_tensor_under_two_names_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("embed.weight")
        editable.edit_tensors(shard, lambda t: t.update({"model.embed.weight": t["embed.weight"]}))
        assert_refused(editable.directory, shard, "model.embed.weight", "is embed.weight, which")


class TestContentHash:
    def test_copy_has_the_same_hash(self, editable: EditableCheckpoint, checkpoint: Checkpoint) -> None:
        assert Checkpoint.open(editable.directory).content_hash == checkpoint.content_hash

    def test_other_weights_have_another_hash(self, tmp_path: Path, checkpoint: Checkpoint) -> None:
        write_tiny_checkpoint(tmp_path, seed=1)
        assert Checkpoint.open(tmp_path).content_hash != checkpoint.content_hash

    def test_other_configuration_has_another_hash(
        self, editable: EditableCheckpoint, checkpoint: Checkpoint
    ) -> None:
        editable.edit_json("config.json", lambda config: config["text_config"].update(swiglu_limit=9.0))
        assert Checkpoint.open(editable.directory).content_hash != checkpoint.content_hash


class TestValues:
    @pytest.mark.parametrize(
        ("name", "offset", "content", "problem"),
        [
            (f"{EXPERT}.scale", 4 * 7 + 3, b"\xff", "element [7, 3] is the ue8m0 code of NaN"),
            (f"{TABLE}.scale", 863, b"\xff", "element [863, 0] is the ue8m0 code of NaN"),
            ("layers.0.attn.wq_a.scale", 0, b"\xff", "element [0, 0] is the ue8m0 code of NaN"),
            (f"{TABLE}.weight", 32 * 5 + 9, b"\x7f", "element [5, 9] is NaN"),
            ("embed.weight", 2 * 256 * 3, b"\x80\x7f", "element [3, 0] is not finite"),
            ("norm.weight", 2 * 255, b"\xc0\xff", "element [255] is not finite"),
            ("layers.0.attn.attn_sink", 4, b"\x00\x00\xc0\x7f", "element [1] is not finite"),
        ],
    )
    def test_value_that_is_no_number_is_refused_when_it_is_read(
        self, editable: EditableCheckpoint, name: str, offset: int, content: bytes, problem: str
    ) -> None:
        editable.set_bytes(name, offset, content)
        checkpoint = Checkpoint.open(editable.directory)
        with pytest.raises(CheckpointError) as refusal:
            checkpoint.read(name)
        assert refusal.value.path.name == editable.shard_of(name)
        assert refusal.value.tensor == name
        assert refusal.value.problem == problem

    def test_element_is_counted_in_the_whole_tensor_when_a_part_is_read(
        self, editable: EditableCheckpoint
    ) -> None:
        editable.set_bytes(f"{EXPERT}.scale", 4 * 7 + 3, b"\xff")
        checkpoint = Checkpoint.open(editable.directory)
        with pytest.raises(CheckpointError, match=r"element \[7, 3\]"):
            checkpoint.read(f"{EXPERT}.scale", rows=slice(6, 9), columns=slice(2, 4))
        checkpoint.read(f"{EXPERT}.scale", rows=slice(8, 20))


class TestShards:
    """Every way in which a shard can fail to be what its header says."""

    @pytest.mark.parametrize("num_bytes", [0, 7, 8, 100])
    def test_shard_cut_in_its_header_is_refused(self, editable: EditableCheckpoint, num_bytes: int) -> None:
        shard = editable.shard_of("embed.weight")
        editable.replace(shard, (editable.directory / shard).read_bytes()[:num_bytes])
        assert_refused(editable.directory, shard, None, f"the file has {num_bytes}")

    def test_shard_cut_in_its_data_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of(f"{TABLE}.weight")
        content = (editable.directory / shard).read_bytes()
        editable.replace(shard, content[:-1])
        last = f"{TABLE}.weight"
        assert_refused(editable.directory, shard, last, f"the file has {len(content) - 1}: it is truncated")

    def test_shard_with_bytes_behind_its_last_tensor_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("embed.weight")
        editable.replace(shard, (editable.directory / shard).read_bytes() + b"\0")
        assert_refused(editable.directory, shard, None, "but its last tensor")

    @pytest.mark.parametrize(
        "header",
        [b"", b"[]", b"{", b"\xff\xfe", b'{"a": 1} {}', b'{"a":' + b"[" * 100_000, b'{"\xff": {}}'],
        ids=["empty", "list", "cut", "binary", "two objects", "deep", "name not UTF-8"],
    )
    def test_header_that_is_no_json_object_is_refused(
        self, editable: EditableCheckpoint, header: bytes
    ) -> None:
        shard = editable.shard_of("embed.weight")
        editable.replace(shard, join(header, b""))
        assert_refused(editable.directory, shard, None, "its header is no JSON object")

    def test_header_longer_than_the_file_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("embed.weight")
        editable.replace(shard, b"\xff" * 8 + (editable.directory / shard).read_bytes()[8:])
        assert_refused(editable.directory, shard, None, f"a header of {2**64 - 1} bytes")

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"dtype": "F16"}, "Invalid enum value 'F16'"),
            ({"dtype": None}, "`$.dtype`"),
            ({"shape": "512"}, "`$.shape`"),
            ({"shape": [512, -256]}, "`$.shape[1]`"),
            ({"shape": [512.5, 256]}, "`$.shape[0]`"),
            ({"data_offsets": [0]}, "`$.data_offsets`"),
            ({"data_offsets": [-2, 262142]}, "`$.data_offsets[0]`"),
            ({"data_offsets": [262144, 0]}, "span -262144 bytes, but BF16 [512, 256] takes 262144"),
            ({"shape": [512, 255]}, "BF16 [512, 255] takes 261120"),
            ({"strides": [1, 2]}, "unknown field `strides`"),
        ],
    )
    def test_nonsense_about_a_tensor_is_refused(
        self, editable: EditableCheckpoint, change: dict[str, Any], problem: str
    ) -> None:
        shard = editable.shard_of("embed.weight")
        editable.edit_header(shard, lambda header: header["embed.weight"].update(change))
        assert_refused(editable.directory, shard, "embed.weight", problem)

    def test_entry_that_is_no_object_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("embed.weight")
        editable.edit_header(shard, lambda header: header.update({"embed.weight": 7}))
        assert_refused(editable.directory, shard, "embed.weight", "its header entry b'7' is invalid")

    def test_overlapping_tensors_are_refused(self, editable: EditableCheckpoint) -> None:
        def share(header: Any) -> None:
            header[f"{EXPERT}.scale"]["data_offsets"] = header["layers.3.ffn.experts.1.w2.scale"][
                "data_offsets"
            ]

        shard = editable.shard_of(f"{EXPERT}.scale")
        editable.edit_header(shard, share)
        with pytest.raises(CheckpointError, match="inside layers.3.ffn.experts.*, which ends at") as refusal:
            Checkpoint.open(editable.directory)
        assert refusal.value.path.name == shard
        assert refusal.value.tensor in (f"{EXPERT}.scale", "layers.3.ffn.experts.1.w2.scale")

    def test_bytes_that_belong_to_no_tensor_are_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of(f"{TABLE}.scale")
        editable.edit_header(shard, lambda header: header.pop(f"{TABLE}.scale"))
        assert_refused(editable.directory, shard, f"{TABLE}.weight", "but the header ends at")

    def test_missing_shard_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of(f"{TABLE}.scale")
        (editable.directory / shard).unlink()
        assert_refused(editable.directory, shard, None, "cannot be read (No such file or directory)")


class TestIndex:
    def test_missing_index_is_refused(self, editable: EditableCheckpoint) -> None:
        (editable.directory / INDEX).unlink()
        assert_refused(editable.directory, INDEX, None, "cannot be read (No such file or directory)")

    @pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"weight_map": {"a": 1}}', b"\xff"])
    def test_nonsense_is_refused(self, editable: EditableCheckpoint, content: bytes) -> None:
        editable.replace(INDEX, content)
        assert_refused(editable.directory, INDEX, None, "is no safetensors index")

    def test_file_outside_the_folder_is_refused(self, editable: EditableCheckpoint) -> None:
        editable.edit_json(
            INDEX, lambda index: index["weight_map"].update({"norm.weight": "../norm.safetensors"})
        )
        assert_refused(editable.directory, INDEX, "norm.weight", "which is no file of this folder")

    def test_tensor_that_its_shard_does_not_have_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("norm.weight")
        editable.edit_json(INDEX, lambda index: index["weight_map"].update({"norm.bias": shard}))
        assert_refused(editable.directory, shard, "norm.bias", f"is named in {INDEX} but not in this file")

    def test_tensor_that_the_index_does_not_have_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("norm.weight")
        editable.edit_json(INDEX, lambda index: index["weight_map"].pop("norm.weight"))
        assert_refused(editable.directory, shard, "norm.weight", f"but {INDEX} has it nowhere")

    def test_tensor_that_lies_in_another_shard_too_is_refused(self, editable: EditableCheckpoint) -> None:
        first, last = editable.shard_of("embed.weight"), editable.shard_of(f"{TABLE}.weight")
        content = (editable.directory / first).read_bytes()
        editable.edit_tensors(last, lambda t: t.update({"embed.weight": Stored("BF16", [1], b"\0\0")}))
        editable.replace(first, content)
        assert_refused(editable.directory, first, "embed.weight", f"has it in {last}")

    def test_shard_that_the_index_does_not_name_is_refused(self, editable: EditableCheckpoint) -> None:
        editable.replace("model-00005-of-00004.safetensors", b"")
        assert_refused(
            editable.directory, "model-00005-of-00004.safetensors", None, f"is not named in {INDEX}"
        )


class TestInventory:
    def test_missing_tensor_is_refused(self, editable: EditableCheckpoint) -> None:
        editable.edit_tensors(editable.shard_of("norm.weight"), lambda t: t.pop("norm.weight"))
        assert_refused(editable.directory, INDEX, "norm.weight", "is missing")

    def test_missing_scale_is_refused(self, editable: EditableCheckpoint) -> None:
        editable.edit_tensors(editable.shard_of(f"{EXPERT}.scale"), lambda t: t.pop(f"{EXPERT}.scale"))
        assert_refused(editable.directory, INDEX, f"{EXPERT}.scale", "is missing")

    def test_missing_layer_names_its_first_tensor_and_counts_the_others(
        self, editable: EditableCheckpoint
    ) -> None:
        def drop(tensors: dict[str, Stored]) -> None:
            for name in [name for name in tensors if name.startswith("layers.11.")]:
                del tensors[name]

        editable.edit_tensors(editable.shard_of("layers.11.attn.attn_sink"), drop)
        assert_refused(editable.directory, INDEX, "layers.11.attn.wq_a.weight", "is missing, like 77 more")

    def test_extra_tensor_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of("norm.weight")
        editable.edit_tensors(shard, lambda t: t.update({"layers.12.attn_norm.weight": t["norm.weight"]}))
        assert_refused(editable.directory, shard, "layers.12.attn_norm.weight", "is not part of this model")

    def test_wrong_dtype_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of(f"{EXPERT}.weight")
        editable.edit_header(shard, lambda header: header[f"{EXPERT}.weight"].update(dtype="F8_E4M3"))
        assert_refused(editable.directory, shard, f"{EXPERT}.weight", "has dtype F8_E4M3, expected I8")

    def test_wrong_shape_is_refused(self, editable: EditableCheckpoint) -> None:
        shard = editable.shard_of(f"{EXPERT}.weight")
        editable.edit_header(shard, lambda header: header[f"{EXPERT}.weight"].update(shape=[128, 128]))
        assert_refused(
            editable.directory, shard, f"{EXPERT}.weight", "has shape [128, 128], expected [256, 64]"
        )

    def test_engram_rows_that_are_not_the_sum_of_their_moduli_are_refused(
        self, editable: EditableCheckpoint
    ) -> None:
        editable.edit_json(
            "config.json", lambda config: config["text_config"].update(engram_num_embeddings=[660, 863])
        )
        assert_refused(
            editable.directory,
            "config.json",
            f"{TABLE}.weight",
            "engram_num_embeddings gives it 863 rows, its hash moduli add up to 864",
        )

    def test_engram_table_with_too_few_rows_is_refused(self, editable: EditableCheckpoint) -> None:
        def drop_last_row(tensors: dict[str, Stored]) -> None:
            stored = tensors[f"{TABLE}.weight"]
            stored.shape, stored.data = [863, 32], stored.data[:-32]

        shard = editable.shard_of(f"{TABLE}.weight")
        editable.edit_tensors(shard, drop_last_row)
        assert_refused(
            editable.directory, shard, f"{TABLE}.weight", "has shape [863, 32], expected [864, 32]"
        )


class TestConfig:
    def test_missing_config_is_refused(self, editable: EditableCheckpoint) -> None:
        (editable.directory / "config.json").unlink()
        assert_refused(editable.directory, "config.json", None, "cannot be read")

    def test_wrong_key_is_named(self, editable: EditableCheckpoint) -> None:
        editable.edit_json("config.json", lambda config: config["text_config"].pop("hidden_size"))
        assert_refused(editable.directory, "config.json", None, "text_config.hidden_size: Field required")

    def test_vision_config_that_is_none_is_refused(self, editable: EditableCheckpoint) -> None:
        editable.edit_json("config.json", lambda config: config.update(vision_config={"hidden_size": 64}))
        assert_refused(editable.directory, "config.json", None, "vision_config does not fit")

    def test_path_that_is_no_folder_is_refused(self, tmp_path: Path) -> None:
        assert_refused(tmp_path / "nowhere", "config.json", None, "cannot be read")


def test_released_layout_opens_and_gives_rows_of_a_table_of_100_gb(tmp_path: Path) -> None:
    """The release's tensors in 48 files of their real sizes, all holes."""
    shutil.copy(RELEASED_CONFIG, tmp_path / "config.json")
    tensors = expected_tensors(CheckpointConfig.load(RELEASED_CONFIG))
    tables = [[name for name in tensors if name.startswith(f"layers.{n}.engram.embed.")] for n in (1, 14)]
    others = [name for name in tensors if ".engram.embed." not in name]
    weight_map = {}
    for number, names in enumerate([others[start::46] for start in range(46)] + tables, start=1):
        file_name = f"model-{number:05}-of-00048.safetensors"
        write_sparse_shard(tmp_path / file_name, {name: tensors[name] for name in names})
        weight_map.update(dict.fromkeys(names, file_name))
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    checkpoint = Checkpoint.open(tmp_path)
    assert len(checkpoint.names) == 96_085
    assert sum(checkpoint.location(name).num_bytes for name in checkpoint.names) == 510_286_023_000
    last_rows = checkpoint.read("layers.14.engram.embed.weight", rows=slice(384016680, 384016682))
    assert last_rows.shape == (2, 256)
    slice_of_rank_0 = checkpoint.read("layers.39.ffn.experts.383.w2.weight", columns=slice(0, 144))
    assert slice_of_rank_0.shape == (5120, 144)


def write_sparse_shard(path: Path, tensors: dict[str, TensorSpec]) -> None:
    """A shard whose data is a hole: all zeros, taking no space."""
    header, end = {}, 0
    for name, spec in tensors.items():
        entry = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (end, end + spec.num_bytes)}
        header[name] = entry
        end += spec.num_bytes
    path.write_bytes(join(json.dumps(header).encode(), b""))
    os.truncate(path, path.stat().st_size + end)
