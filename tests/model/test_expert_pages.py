import pytest
import torch

from kernels.reference.expert_pages import load_codes, load_scales
from model.checkpoint import Checkpoint
from model.expert_pages import fill_page, local_experts_per_layer, page_layout
from model.parallel import ParallelLayout


def pages_of_all_ranks(checkpoint: Checkpoint, world_size: int, ep_size: int, layer: int, expert_id: int):
    """Matrices `[rows, bytes]` of one expert on every rank that holds a share of it, in rank order."""
    config = checkpoint.config.text_config
    for rank in range(world_size):
        parallel = ParallelLayout(rank, world_size, ep_size)
        local = parallel.local_experts(config.num_experts_of(layer))
        if expert_id not in local:
            continue
        layout = page_layout(config, parallel)
        page = torch.full((layout.num_bytes,), 0xEE, dtype=torch.uint8)
        fill_page(page, checkpoint, config, parallel, layer, expert_id - local.start)
        inter = layout.intermediate_size
        yield {
            "w1.weight": load_codes(page[layout.gate_codes], inter),
            "w3.weight": load_codes(page[layout.up_codes], inter),
            "w1.scale": load_scales(page[layout.gate_scales], inter),
            "w3.scale": load_scales(page[layout.up_scales], inter),
            "w2.weight": load_codes(page[layout.down_codes], config.hidden_size),
            "w2.scale": load_scales(page[layout.down_scales], config.hidden_size),
        }


@pytest.mark.parametrize(("world_size", "ep_size"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize(("layer", "name"), [(0, "layers.0"), (11, "layers.11"), (13, "mtp.1")])
def test_the_shares_of_all_ranks_together_are_the_expert(tiny_checkpoint, world_size, ep_size, layer, name):
    checkpoint = Checkpoint.open(tiny_checkpoint)
    for expert_id in range(checkpoint.config.text_config.num_experts_of(layer)):
        shares = list(pages_of_all_ranks(checkpoint, world_size, ep_size, layer, expert_id))
        assert len(shares) == world_size // ep_size
        for section in shares[0]:
            whole = torch.cat([share[section] for share in shares], dim=1 if section.startswith("w2") else 0)
            assert torch.equal(whole, checkpoint.read(f"{name}.ffn.experts.{expert_id}.{section}")), section


def test_every_layer_and_draft_has_its_share_of_the_experts(tiny_checkpoint):
    config = Checkpoint.open(tiny_checkpoint).config.text_config
    assert local_experts_per_layer(config, ParallelLayout(1, 2, 2)) == (4,) * 12 + (2,) * 3
    assert local_experts_per_layer(config, ParallelLayout(1, 2, 1)) == (8,) * 12 + (4,) * 3
