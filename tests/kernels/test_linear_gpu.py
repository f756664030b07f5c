"""Dense products, activation and router on a GPU, at the shapes of one rank of eight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import activation, linear, router
from kernels.reference import activation as reference_activation
from kernels.reference import linear as reference_linear
from kernels.reference import router as reference_router
from kernels.reference.quantize import dequantize_fp8_tiles
from kernels.tensors import Fp8Matrix, Matrix

pytestmark = pytest.mark.gpu

FP8_SHAPES = [(1792, 5120), (8192, 1280), (1024, 4096), (5120, 1024), (576, 5120), (5120, 288), (25600, 768)]
BF16_SHAPES = [(384, 5120), (1056, 5120), (32, 5120), (16160, 5120), (1, 5376)]


def random_matrix(shape: tuple[int, int], is_fp8: bool) -> Matrix:
    values = torch.randn(shape, device="cuda")
    if not is_fp8:
        return (values * shape[1] ** -0.5).to(torch.bfloat16)
    codes = (values * 64).clamp(-448, 448).to(torch.float8_e4m3fn)
    tiles = (shape[0] // 32, shape[1] // 32)
    return Fp8Matrix(codes, torch.randint(112, 122, tiles, dtype=torch.uint8, device="cuda"))


@pytest.mark.parametrize("num_rows", [1, 6, 48, 64, 65, 300])
@pytest.mark.parametrize(
    ("shape", "is_fp8"), [*((s, True) for s in FP8_SHAPES), *((s, False) for s in BF16_SHAPES)]
)
def test_products_equal_the_reference_but_for_the_order_of_additions(
    shape: tuple[int, int], is_fp8: bool, num_rows: int
) -> None:
    torch.manual_seed(0)
    w = random_matrix(shape, is_fp8)
    x = torch.randn(num_rows, shape[1], device="cuda").to(torch.bfloat16)
    expected = reference_linear.linear(x, w, torch.float64)
    # FP32 sums of exact products: an error of some additions' last bits, relative to what is added.
    size = reference_linear.linear(x.abs(), _magnitudes(w), torch.float64)
    actual = linear.linear(x, w)
    assert ((actual - expected).abs() <= 1e-5 * size).all()
    rounded = linear.linear(x, w, out_dtype=torch.bfloat16)
    assert ((rounded.double() - expected).abs() <= 2**-8 * expected.abs() + 1e-5 * size).all()
    if shape[0] % 32 == 0:
        quantized = linear.linear(x, w, quantize=True)
        differs = quantized != reference_linear.linear(x, w, quantize=True)
        assert differs.float().mean() < 0.02, "only sums near the middle of two codes may round apart"


def _magnitudes(w: Matrix) -> Tensor:
    return (dequantize_fp8_tiles(*w) if isinstance(w, Fp8Matrix) else w.float()).abs()


@pytest.mark.parametrize(("shape", "is_fp8"), [((1792, 5120), True), ((384, 5120), False)])
def test_a_row_has_the_same_bits_in_every_batch_of_the_kernel(shape: tuple[int, int], is_fp8: bool) -> None:
    w = random_matrix(shape, is_fp8)
    x = torch.randn(64, shape[1], device="cuda").to(torch.bfloat16)
    expected = linear.linear(x, w)
    for begin, end in ((0, 1), (3, 9), (10, 42), (63, 64)):
        assert torch.equal(linear.linear(x[begin:end], w), expected[begin:end])
    x[5] = torch.nan
    spoilt = linear.linear(x, w)
    assert spoilt[5].isnan().all()
    assert torch.equal(spoilt[6:], expected[6:])


def test_every_code_and_scale_is_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8, device="cuda").repeat(32, 1)
    eye = torch.eye(256, dtype=torch.bfloat16, device="cuda")
    for scale in (87, 100, 127, 147):
        w = Fp8Matrix(
            codes.view(torch.float8_e4m3fn), torch.full((1, 8), scale, dtype=torch.uint8, device="cuda")
        )
        finite = [code for code in range(256) if code % 128 != 127]
        for begin in range(0, len(finite), 64):
            rows = eye[finite[begin : begin + 64]]
            w.codes.view(torch.uint8)[:, [127, 255]] = 0
            assert torch.equal(linear.linear(rows, w), reference_linear.linear(rows, w))


def test_activation_and_router_equal_the_reference() -> None:
    torch.manual_seed(0)
    for num_rows in (1, 6, 300):
        gate_up = torch.randn(num_rows, 576, device="cuda").mul(6).to(torch.bfloat16)
        differs = activation.swiglu_q8(gate_up, 10.0) != reference_activation.swiglu_q8(gate_up, 10.0)
        assert differs.float().mean() < 0.01
        logits, bias = torch.randn(num_rows, 384, device="cuda"), torch.randn(384, device="cuda") * 0.1
        idx, weights = router.choose_experts(logits, bias, 6, 1.5)
        expected_idx, expected = reference_router.choose_experts(logits, bias, 6, 1.5)
        assert torch.equal(idx, expected_idx)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
