"""The model equals the independent golden numbers of the specification (appendix B), to the printed digits."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from kernels.reference.norm import rms_norm
from kernels.reference.quantize import unpack_q4n, unpack_q4u, unpack_q8
from kernels.reference.rope import apply_rope
from kernels.tensors import QuantizedRows
from model.dspark import Anchor
from model.numerics import Numerics
from model.sampler import greedy
from tests.model.builders import GOLDEN, TinyModel, create_tiny_model

GOLDEN_FILE = json.loads((Path(__file__).parent.parent / "data" / "tiny_golden.json").read_text())
TOKENS: list[int] = GOLDEN_FILE["tokens"]
VARIANTS = ("A", "A_smooth", "B")
LAST = 69


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def golden(variant: str) -> dict[str, Any]:
    return dict(GOLDEN_FILE["variants"][variant]["result"])


@pytest.fixture(scope="module")
def prefilled(variant: str, tiny_checkpoints: dict[str, Path]) -> tuple[TinyModel, Tensor]:
    """A model that has seen the whole prompt in one chunk, and the logits of all positions."""
    model = create_tiny_model(tiny_checkpoints[variant])
    return model, model.prefill(TOKENS)


def assert_printed(actual: Tensor, expected: object, what: str) -> None:
    """Equal to the ten significant digits that the golden file prints."""
    target = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(
        actual.to(torch.float64), target, rtol=1e-9, atol=1e-9, msg=lambda text: f"{what}: {text}"
    )


def test_logits_of_a_whole_prefill_are_golden(
    golden: dict[str, Any], prefilled: tuple[TinyModel, Tensor]
) -> None:
    _, logits = prefilled
    assert greedy(logits).tolist() == golden["argmax"]
    for position, values in golden["first16"].items():
        row = logits[int(position)]
        assert_printed(row[:16], values, f"logits at {position}")
        assert_printed(row.logsumexp(-1), golden["logsumexp"][position], f"logsumexp at {position}")


def test_every_recorded_tensor_of_every_layer_is_golden(
    golden: dict[str, Any], prefilled: tuple[TinyModel, Tensor]
) -> None:
    model, _ = prefilled
    last = model.recorder.last
    for name, expected in golden["layers_at_position_69"].items():
        layer = int(name)
        views = {
            "stream_in_first4_per_copy": last(layer, "stream_in")[:, :4],
            "pre_used": last(layer, "pre"),
            "attn_norm_out8": last(layer, "attn_norm_out")[:8],
            "qr8": _low_rank_query(model, layer)[:8],
            "q_head0_last8": _rotate(model, layer, last(layer, "q")[0])[-8:],
            "window_kv_first8": _window_key(model, layer)[:8],
            "window_kv_last8": _window_key(model, layer)[-8:],
            "attn_core_head0_last8": last(layer, "attn_core")[0, -8:],
            "attn_out8": last(layer, "attn_out").to(torch.bfloat16)[:8],
            "stream_mid_copy0_8": last(layer, "stream_mid")[0, :8],
            "router_experts": last(layer, "topk_idx"),
            "moe_out8": last(layer, "moe_out").to(torch.bfloat16)[:8],
            "stream_out_copy3_8": last(layer, "stream_out")[3, :8],
        } | _optional_views(model, layer, expected)
        missing = expected.keys() - views.keys() - {"router_weights_by_expert"}
        assert not missing, f"layer {layer}: golden values without a check: {missing}"
        for key, value in views.items():
            printed = expected[key]
            if key == "attn_core_head0_last8":  # ours is rotated back already
                printed = _rotate(model, layer, torch.tensor(printed), inverse=True).tolist()
            assert_printed(value, printed, f"layer {layer}: {key}")
        weights = dict(
            zip(last(layer, "topk_idx").tolist(), last(layer, "topk_weights").tolist(), strict=True)
        )
        for expert, weight in expected["router_weights_by_expert"].items():
            assert weights[int(expert)] == pytest.approx(weight, rel=1e-9)


def _low_rank_query(model: TinyModel, layer: int) -> Tensor:
    norm = model.transformer.weights.layers[layer].attention.q_norm
    projected = model.recorder.last(layer, "low_rank")[: len(norm)].to(torch.bfloat16)
    return rms_norm(projected, norm, model.config.rms_norm_eps, torch.float64)


def _window_key(model: TinyModel, layer: int) -> Tensor:
    codes, scales = (model.recorder.last(layer, name) for name in ("window_kv", "window_kv_scales"))
    return unpack_q8(QuantizedRows(codes, scales))


def _rotate(model: TinyModel, layer: int, x: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the pairs of `x`, the last ones of a vector at the last position."""
    frequencies = model.transformer.attention.frequencies(layer)[-(len(x) // 2) :]
    x = x.to(torch.bfloat16).unsqueeze(0)
    return apply_rope(x, torch.tensor([LAST]), frequencies, inverse=inverse).squeeze(0)


def _optional_views(model: TinyModel, layer: int, expected: dict[str, Any]) -> dict[str, Tensor]:
    views: dict[str, Tensor] = {}
    caches = model.transformer.caches
    table = array("i", model.rows(TOKENS, 0, 1).block_table)
    if "selected" in expected:
        per_block = model.geometry.entries_per_block(model.config.compress_ratios[layer])
        places = model.recorder.last(layer, "selected").tolist()
        views["selected"] = torch.tensor(
            [
                table.index(place // per_block) * per_block + place % per_block
                for place in places
                if place >= 0
            ]
        )
    if "pool_entries" in expected:
        size = model.config.candidate_block_size
        blocks = model.recorder.last(layer, "pool").tolist()
        entries = [block * size + i for block in blocks if block >= 0 for i in range(size)]
        views["pool_entries"] = torch.tensor([entry for entry in entries if entry < len(TOKENS)])
    if "engram_ids" in expected:
        views["engram_ids"] = model.recorder.last(layer, "engram_ids")
    if "compressed_entry10_first8" in expected:
        per_block = model.geometry.entries_per_block(model.config.compress_ratios[layer])
        place = table[10 // per_block] * per_block + 10 % per_block
        entry = unpack_q4n(QuantizedRows(*(t[place] for t in caches.entries[layer])))
        views["compressed_entry10_first8"], views["compressed_entry10_last8"] = entry[:8], entry[-8:]
        key = unpack_q4u(QuantizedRows(*(t[place] for t in caches.index_keys[layer])))
        views["index_key10_last8"] = key[-8:]
    return views


def test_what_the_backbone_leaves_for_head_and_drafter_is_golden(
    variant: str, golden: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    model = create_tiny_model(tiny_checkpoints[variant])
    batch, hidden = model.step(model.rows(TOKENS, 0, len(TOKENS)))
    assert_printed(hidden.normed[-1, :8], golden["final_hidden8"], "final hidden")
    main = model.dspark.commit(hidden.taps, batch.decoder)
    assert_printed(main[-1, :8], golden["main_x8"], "main_x")


def test_a_draft_pass_is_golden(golden: dict[str, Any], prefilled: tuple[TinyModel, Tensor]) -> None:
    model, _ = prefilled
    expected = golden["draft"]
    draft = model.dspark.draft([Anchor(0, expected["p"], expected["y"])], greedy)
    assert draft.token_ids.tolist() == [expected["drafts"]]
    assert_printed(draft.confidence[0], expected["confidence_raw"], "confidence")


@pytest.mark.parametrize("splits", [(7,), (9,), (17,), (37,), (1, 2, 15, 16, 31, 33, 47, 65)], ids=str)
def test_chunks_give_the_logits_of_a_whole_prefill(
    splits: tuple[int, ...],
    variant: str,
    prefilled: tuple[TinyModel, Tensor],
    tiny_checkpoints: dict[str, Path],
) -> None:
    logits = create_tiny_model(tiny_checkpoints[variant]).prefill(TOKENS, splits)
    assert torch.equal(logits, prefilled[1])


def test_token_by_token_decode_gives_the_logits_of_a_whole_prefill(
    variant: str, prefilled: tuple[TinyModel, Tensor], tiny_checkpoints: dict[str, Path]
) -> None:
    logits = create_tiny_model(tiny_checkpoints[variant]).prefill(TOKENS, range(1, len(TOKENS)))
    assert torch.equal(logits, prefilled[1])


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 33, 47])
def test_a_shorter_prompt_gives_the_logits_of_its_prefix(
    length: int, variant: str, prefilled: tuple[TinyModel, Tensor], tiny_checkpoints: dict[str, Path]
) -> None:
    logits = create_tiny_model(tiny_checkpoints[variant]).prefill(TOKENS[:length])
    assert torch.equal(logits, prefilled[1][:length])


def test_greedy_continuation_is_golden(
    variant: str, golden: dict[str, Any], tiny_checkpoints: dict[str, Path]
) -> None:
    model = create_tiny_model(tiny_checkpoints[variant])
    tokens = list(TOKENS)
    logits = model.prefill(tokens)[-1:]
    for _ in golden["greedy_continuation"]:
        tokens.append(int(greedy(logits)))
        _, hidden = model.step(model.rows(tokens, len(tokens) - 1, len(tokens)))
        logits = model.transformer.logits(hidden.normed)
    assert tokens[len(TOKENS) :] == golden["greedy_continuation"]


@pytest.mark.parametrize("splits", [(), (53,), (54,), (55,), (20, 40, 60)], ids=str)
def test_decoder_replay_is_golden_for_any_chunking(
    splits: tuple[int, ...],
    variant: str,
    prefilled: tuple[TinyModel, Tensor],
    tiny_checkpoints: dict[str, Path],
) -> None:
    expected = GOLDEN_FILE["variants"][variant]["replay_last16"]
    model = create_tiny_model(tiny_checkpoints[variant])
    logits = model.prefill(TOKENS, splits, decoder_start=expected["replay_start"])
    assert logits.shape[0] == len(TOKENS) - expected["replay_start"]
    assert_printed(logits[-1, :16], expected["first16"], "replayed logits")
    assert int(greedy(logits[-1:])) == expected["argmax"]
    difference = float((logits[-1] - prefilled[1][-1]).abs().max())
    assert difference == pytest.approx(expected["max_abs_diff_vs_full"], rel=1e-5)


@pytest.mark.parametrize("num_accepted", range(6))
@pytest.mark.parametrize("prompt_length", [33, 34])
def test_a_rejected_verify_leaves_no_trace(
    num_accepted: int, prompt_length: int, tiny_checkpoints: dict[str, Path]
) -> None:
    """Six rows are verified, the wrong ones among them are overwritten by the next step; odd and even rollbacks."""
    plain = create_tiny_model(tiny_checkpoints["A"]).prefill(TOKENS)
    model = create_tiny_model(tiny_checkpoints["A"])
    model.prefill(TOKENS[:prompt_length])
    right_until = prompt_length + 1 + num_accepted
    wrong = TOKENS[:right_until] + [(t + 1) % 512 for t in TOKENS[right_until : prompt_length + 6]]
    _, verified = model.step(model.rows(wrong, prompt_length, prompt_length + 6))
    accepted = model.transformer.logits(verified.normed)[: num_accepted + 1]
    assert torch.equal(accepted, plain[prompt_length:right_until])
    _, after = model.step(model.rows(TOKENS, right_until, len(TOKENS)))
    assert torch.equal(model.transformer.logits(after.normed), plain[right_until:])


def assert_near(logits: Tensor, exact: Tensor, least_agreement: float) -> None:
    """Mean KL divergence from `exact` at most 2e-3 over all positions, and so much of the argmax equal."""
    log_p, log_q = exact.log_softmax(-1), logits.to(torch.float64).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    agreement = (greedy(exact) == greedy(logits)).double().mean()
    assert kl <= 2e-3, f"{kl=}"
    assert agreement >= least_agreement, f"{agreement=}"


@pytest.mark.parametrize(
    ("expert_activations", "least_golden_agreement"),
    [
        ("fp8", 0.9),
        # Other arithmetic than the golden numbers' (spec 6: "a looser tolerance"), not less exact: in FP64, too, it
        # agrees with them at 61 of 70 positions (0.871). Their two largest logits differ by 0.14 at most at the others.
        ("bf16", 0.85),
    ],
)
def test_serving_precision_stays_near_exact_arithmetic_and_the_golden_logits(
    expert_activations: Literal["bf16", "fp8"],
    least_golden_agreement: float,
    tiny_checkpoints: dict[str, Path],
) -> None:
    """On A_smooth, over 70 positions: mean KL at most 2e-3 and 90 % equal argmax (spec 13.1)."""

    def prefill(numerics: Numerics) -> Tensor:
        return create_tiny_model(tiny_checkpoints["A_smooth"], numerics).prefill(TOKENS)

    logits = prefill(Numerics.serving("fp32", expert_activations))
    assert_near(logits, prefill(Numerics.serving("fp64", expert_activations)), least_agreement=0.9)
    assert_near(logits, prefill(GOLDEN), least_golden_agreement)
