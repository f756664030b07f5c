"""Mixture of experts: router, routed experts from pages, shared expert. Source: `spec/model.md` section 6."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernels import experts as kernels
from kernels.expert_rows import combine
from kernels.reference import experts as reference
from model.collectives import Collectives
from model.config import ModelConfig
from model.expert_source import ExpertSource, PageGroup
from model.numerics import Numerics
from model.operators import Operators
from model.parallel import ParallelLayout
from model.probe import Probe
from model.weights import MoeWeights


class MixtureOfExperts:
    """The MoE of all layers of one rank."""

    def __init__(
        self,
        config: ModelConfig,
        layout: ParallelLayout,
        experts: ExpertSource,
        collectives: Collectives,
        operators: Operators,
        numerics: Numerics,
        device: torch.device,
        probe: Probe,
    ) -> None:
        self._config = config
        self._layout = layout
        self._experts = experts
        self._collectives = collectives
        self._operators = operators
        self._numerics = numerics
        self._probe = probe
        # The kernels take bf16 activations and accumulate in fp32; golden numbers and the CPU want the reference.
        self._use_kernels = (
            device.type == "cuda"
            and numerics.accumulate == torch.float32
            and not numerics.quantize_expert_activations
        )

    def forward(
        self, layer: int, weights: MoeWeights, x: Tensor, x_q8: Tensor, following: MoeWeights | None = None
    ) -> Tensor:
        """Routed experts plus shared expert.

        Args:
            layer: layer id, draft stages after the backbone.
            weights: router and shared expert.
            x: `[num_tokens, hidden]` bf16, normalised.
            x_q8: the same in Q8.
            following: of the next layer, for a guess at what its router will choose; None if there is none.
        Returns: `[num_tokens, hidden]` in the accumulation type, complete on every rank; NaN for a token that needed a
            page which cannot be read.
        """
        topk_idx, topk_weights = self._route(layer, weights, x)
        self._probe(layer, "topk_idx", topk_idx)
        self._probe(layer, "topk_weights", topk_weights)
        in_place = self._experts.in_place(layer, len(x))
        if following is not None and self._experts.wants_prediction(layer + 1, len(x)):
            self._experts.predict(layer + 1, self._route(layer + 1, following, x)[0])
        groups = self._stream(layer, topk_idx) if in_place is None else (in_place,)
        routed = self._routed(layer, x, topk_idx, topk_weights, groups)
        shared = self._shared(weights, x_q8)
        return self._combine(layer, routed, topk_idx, shared)

    def _local_experts(self, layer: int) -> range:
        return self._layout.local_experts(self._config.num_experts_of(layer))

    def _route(self, layer: int, weights: MoeWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        """`topk_idx` and `topk_weights`, both `[num_tokens, num_topk]`."""
        return self._operators.choose_experts(
            self._operators.linear(x, weights.gate),
            weights.bias,
            self._config.num_topk_of(layer),
            self._config.routed_scaling_factor,
        )

    def _stream(self, layer: int, topk_idx: Tensor) -> Iterator[PageGroup]:
        """The pages of the chosen experts, group by group; waits for the routing."""
        local = self._local_experts(layer)
        chosen = torch.unique(topk_idx).tolist()
        return self._experts.stream(layer, [expert - local.start for expert in chosen if expert in local])

    def _routed(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, groups: Iterable[PageGroup]
    ) -> Tensor:
        """This rank's part of every chosen expert's output: `[num_tokens, num_topk, hidden]`, accumulation type.

        Zero where the expert is another rank's. With the kernels bf16, and undefined there: they combine it, too.
        """
        first = self._local_experts(layer).start
        shape = (*topk_idx.shape, x.shape[1])
        out = x.new_empty(shape) if self._use_kernels else topk_weights.new_zeros(shape)
        for group in groups:
            self._multiply(layer, x, topk_idx, topk_weights, group, out)
            # NaN reaches the logits of exactly the sequences that needed the page, on every rank.
            for expert in group.failed:
                out[topk_idx == first + expert] = torch.nan
        return out

    def _multiply(
        self, layer: int, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, group: PageGroup, out: Tensor
    ) -> None:
        """Write the outputs of the experts in `group` to `out`."""
        config = self._config
        routing = (topk_idx, topk_weights, group.addresses)
        rest = (self._local_experts(layer).start, self._experts.layout, out)
        if self._use_kernels:
            num_experts = config.num_experts_of(layer)
            kernels.expert_mlp(
                x, *routing, group.is_member, *rest, num_experts=num_experts, limit=config.swiglu_limit
            )
        else:
            quantize = self._numerics.quantize_expert_activations
            reference.expert_mlp(
                x, *routing, group.experts, *rest, limit=config.swiglu_limit, quantize_activations=quantize
            )

    def _shared(self, weights: MoeWeights, x_q8: Tensor) -> Tensor:
        """This rank's part of the shared expert's output: `[num_tokens, hidden]`, accumulation type."""
        operators = self._operators
        gate_up = operators.linear(x_q8, weights.shared_gate_up, out_dtype=torch.bfloat16)
        return operators.linear(operators.swiglu_q8(gate_up, self._config.swiglu_limit), weights.shared_down)

    def _combine(self, layer: int, routed: Tensor, topk_idx: Tensor, shared: Tensor) -> Tensor:
        """Sum over choices in ascending expert order, shared expert last; what reads it rounds it.

        With the reference's rounding each expert's complete output is BF16 before the sum, so the ranks' parts of every
        single output are added first; otherwise each rank sums what it has and one vector per token crosses ranks.
        """
        if self._numerics.quantize_expert_activations:
            parts = torch.cat((routed, shared.unsqueeze(1)), dim=1)
            complete = self._collectives.all_reduce(parts).to(torch.bfloat16).to(parts.dtype)
            return _sum_in_order(complete)
        if self._use_kernels:
            partial = combine(routed, topk_idx, self._local_experts(layer)) + shared
        else:
            partial = _sum_in_order(routed) + shared
        return self._collectives.all_reduce(partial)


def _sum_in_order(parts: Tensor) -> Tensor:
    """Left-to-right sum over axis 1: `[num_tokens, n, hidden]` to `[num_tokens, hidden]`."""
    total = parts[:, 0]
    for part in parts.unbind(1)[1:]:
        total = total + part
    return total
