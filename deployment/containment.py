"""What a Serve replica does so that its cluster listens where it should and ends when it should.

Ray 2.60 has no setting for either of these:

- A replica opens a gRPC server for requests from other replicas, and opens it on every interface, also in a
  cluster whose node has the loopback address and whose other servers all listen there. It trusts any caller.
- A raylet that is killed, which happens when the process that started the cluster is, leaves its two agents.
  Each tries for 60 s to report the death to a control store that was killed in the same moment.
"""

import os
import threading
from pathlib import Path

import ray
from ray._common.network_utils import build_address, is_localhost
from ray.serve._private import replica as serve_replica

from actors.process import OtherProcess
from deployment.launch import children_of

RAYLET_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


def contain_replica() -> None:
    """Keep this replica's servers on the node's address and end the raylet's agents with the raylet.

    Every deployment calls this first in its constructor; the gRPC server opens when that has returned.
    """
    node_ip_address = ray.util.get_node_ip_address()
    if is_localhost(node_ip_address):
        bind_grpc_server_to(node_ip_address)
    if hasattr(os, "pidfd_open"):  # Linux
        end_agents_with(int(os.environ["RAY_RAYLET_PID"]))


def bind_grpc_server_to(ip_address: str) -> None:
    """Make the gRPC server that this replica is about to open listen on `ip_address` instead of on all."""
    add_port_to_grpc_server = serve_replica.add_port_to_grpc_server

    def add_port(server: object, address: str) -> int:
        assert address.startswith("[::]:"), f"{address=}"
        port: int = add_port_to_grpc_server(server, build_address(ip_address, address.removeprefix("[::]:")))
        return port

    serve_replica.add_port_to_grpc_server = add_port


def end_agents_with(raylet_pid: int) -> None:
    """Kill the raylet's agents as soon as the raylet is gone, however it went."""
    raylet = OtherProcess(raylet_pid)
    agents = [OtherProcess(pid) for pid in children_of(raylet_pid) if _title_of(pid) in RAYLET_AGENTS]

    def wait_and_kill() -> None:
        while not raylet.is_gone(timeout_s=3600):
            pass
        for agent in agents:
            agent.kill()

    threading.Thread(target=wait_and_kill, name="end-agents-with-raylet", daemon=True).start()


def _title_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace").strip()
    except OSError:  # it ended in the meantime
        return ""
