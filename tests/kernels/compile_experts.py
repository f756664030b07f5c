"""Compile the kernels of experts and their pages ahead of time for one target; print what they need: one JSON line.

    python -m tests.kernels.compile_experts CAPABILITY      for example 120

In a process of its own, since the tests run Triton's interpreter.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from kernels import expert_decode, expert_prefill, page_prefetch
from kernels.formats import PageLayout

GROUPED = {"pairs": "*i32", "offsets": "*i32", "counts": "*i32", "addresses": "*i64"}
DECODE = GROUPED | {"active": "*i32"}
PREFILL = GROUPED | {"tile_experts": "*i32", "tile_starts": "*i32"}
GATE_UP = {"x": "*bf16", "topk_weights": "*fp32", "h": "*bf16", "limit": "fp32"}
DOWN = {"h": "*bf16", "out": "*bf16"}
PREFETCH = {"addresses": "*i64", "table": "*i64", "was_prefetched": "*i1", "chosen": "*i32"}
CHOOSE = {
    "topk_idx": "*i64",
    "is_cold": "*i1",
    "first_expert": "i32",
    "num_pairs": "i32",
    "num_local": "i32",
    "num_slots": "i32",
}
COPY = {"slots": "*u8", "num_vectors": "i32"}


def main() -> None:
    """Compile what is launched for whole experts and for slices, for few rows an expert and for many."""
    capability = int(sys.argv[1])
    results = []
    for inter in (2304, 288):
        layout = PageLayout(5120, inter)
        for mean_rows in (1.0, 8.0):
            config = expert_decode.decode_config(layout, mean_rows, divmod(capability, 10))
            options = expert_decode.gate_up_options(layout, 6, config)
            results.append(compile_for(capability, expert_decode._gate_up_kernel, DECODE | GATE_UP, options))
            options = expert_decode.down_options(layout, config)
            results.append(compile_for(capability, expert_decode._down_kernel, DECODE | DOWN, options))
        for mean_rows in (16.0, 100.0):
            prefill = expert_prefill.prefill_config(mean_rows, divmod(capability, 10))
            options = expert_prefill.gate_up_options(layout, 6, prefill)
            results.append(
                compile_for(capability, expert_prefill._gate_up_kernel, PREFILL | GATE_UP, options)
            )
            options = expert_prefill.down_options(layout, prefill)
            results.append(compile_for(capability, expert_prefill._down_kernel, PREFILL | DOWN, options))
    for num_local in (48, 384):
        experts = {"EXPERTS": triton.next_power_of_2(num_local), "PAIRS": 32, "num_warps": 4}
        results.append(compile_for(capability, page_prefetch._choose_kernel, PREFETCH | CHOOSE, experts))
    copy = {"WORDS": 2048, "num_warps": 4}
    results.append(compile_for(capability, page_prefetch._copy_kernel, PREFETCH | COPY, copy))
    sys.stdout.write(json.dumps(results) + "\n")


def compile_for(
    capability: int, kernel: Any, arguments: dict[str, str], options: dict[str, Any]
) -> dict[str, Any]:
    """Compile a kernel and read its resources."""
    names = kernel.arg_names
    constants = {name: value for name, value in options.items() if name in names}
    source_type = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = source_type(
        kernel,
        signature={name: arguments.get(name, "constexpr") for name in names},
        constexprs=constants,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(names)
            if arguments.get(name, "").startswith("*")
        },
    )
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={name: value for name, value in options.items() if name not in names},
    )
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
    return {
        "kernel": f"{kernel.fn.__module__}.{kernel.fn.__name__}",
        "constants": constants,
        "threads": 32 * options["num_warps"],
        "registers": int(registers),
        "stack_bytes": int(stack),
        "shared_bytes": compiled.metadata.shared,
    }


if __name__ == "__main__":
    main()
