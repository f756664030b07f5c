"""The expert kernels compile for GPUs that are not here: an RTX 5090 (compute capability 12.0), and older ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

MAX_SHARED_BYTES = 99 * 1024
"""Of one program on compute capability 12.0 and 8.6, which have the least."""


@pytest.mark.parametrize("capability", ["120", "86"])
def test_every_expert_kernel_fits(capability: str) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_experts", capability],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    kernels = json.loads(run.stdout)
    assert {(kernel["kernel"], kernel["constants"].get("INTER")) for kernel in kernels} == {
        (f"kernels.expert_{path}._{product}_kernel", inter)
        for path in ("decode", "prefill")
        for product in ("gate_up", "down")
        for inter in (2304, 288)
    } | {(f"kernels.page_prefetch._{part}_kernel", None) for part in ("choose", "copy")}
    for kernel in kernels:
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, kernel
        assert kernel["registers"] * kernel["threads"] <= 65536, kernel
        assert kernel["stack_bytes"] == 0, f"registers spill: {kernel}"
