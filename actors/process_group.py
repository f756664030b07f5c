"""The process group of the shards. Ranks find each other through a store that rank 0 opens."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from model.collectives import Collectives
from model.parallel import ParallelLayout

LOOPBACK = "127.0.0.1"


def open_store(timeout_s: float) -> TCPStore:
    """Open the store of a new group on a free port of the loopback interface; `port` tells which.

    Args:
        timeout_s: how long ranks wait for each other.
    """
    # torch would listen on all interfaces; it takes a socket that listens already.
    listener = socket.create_server((LOOPBACK, 0), backlog=64)
    port = listener.getsockname()[1]
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def connect_store(port: int, timeout_s: float) -> TCPStore:
    """The store that rank 0 opened."""
    return TCPStore(LOOPBACK, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def join_group(
    store: TCPStore, layout: ParallelLayout, device: torch.device, timeout_s: float
) -> Collectives:
    """Form the group with all other ranks: NCCL between GPUs, gloo between CPU processes.

    Args:
        store: the group's own.
        layout: this rank's.
        device: where its tensors live.
        timeout_s: a collective that takes longer raises.
    """
    is_cuda = device.type == "cuda"
    # All ranks are on one machine: nothing has to be reachable from another.
    os.environ.setdefault("NCCL_SOCKET_IFNAME" if is_cuda else "GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        store=store,
        rank=layout.rank,
        world_size=layout.world_size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if is_cuda else None,
    )
    return Collectives(layout, dist.group.WORLD)


def leave_group() -> None:
    """Free the group's means; safe without a group."""
    if dist.is_initialized():
        dist.destroy_process_group()
