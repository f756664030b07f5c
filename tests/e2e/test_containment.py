"""Where a cluster started by `deployment.launch` listens, and what a SIGKILL leaves of it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml
from ray import serve

from deployment.containment import contain_replica

pytestmark = pytest.mark.ray


class Answer:
    """The deployment behind."""

    def __init__(self) -> None:
        contain_replica()

    def answer(self) -> str:
        return "contained"


class Front:
    """The deployment that HTTP requests reach."""

    def __init__(self, behind: serve.handle.DeploymentHandle) -> None:
        contain_replica()
        self.behind = behind

    async def __call__(self) -> str:
        return await self.behind.answer.remote()


def build(args: dict) -> serve.Application:
    front = serve.deployment(Front).options(ray_actor_options={"num_cpus": 0})
    behind = serve.deployment(Answer).options(ray_actor_options={"num_cpus": 0})
    return front.bind(behind.bind())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until(condition, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def members(session_id: int) -> list[psutil.Process]:
    """The processes of a session: every one that the launched process started, whoever its parent is now."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[subprocess.Popen]:
    port = free_port()
    config = tmp_path / "serve_config.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "proxy_location": "HeadOnly",
                "http_options": {"host": "127.0.0.1", "port": port},
                "applications": [{"name": "contained", "import_path": f"{__name__}:build", "args": {}}],
            }
        )
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "deployment.launch", str(config)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def answers() -> bool:
        assert process.poll() is None, f"serve run ended with {process.returncode}"
        try:
            return httpx.get(f"http://127.0.0.1:{port}/", timeout=5).text == "contained"
        except httpx.TransportError:
            return False

    try:
        wait_until(answers, 90, "an answer")
        yield process
    finally:
        for member in members(process.pid):
            member.kill()
        process.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and kills by pidfd")
def test_nothing_listens_beyond_loopback_and_nothing_outlives_a_kill(launched):
    shared_memory_before = set(os.listdir("/dev/shm"))
    listening = {
        f"{process.name()} {connection.laddr.ip}"
        for process in members(launched.pid)
        for connection in process.net_connections("inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    }
    assert len(listening) >= 5, (
        listening
    )  # the proxy, the control store, the raylet, the agents, the replicas
    assert {line for line in listening if not line.endswith(("127.0.0.1", "::1"))} == set()

    launched.send_signal(signal.SIGKILL)
    launched.wait()
    wait_until(lambda: not members(launched.pid), 15, "the end of every process of the cluster")
    assert set(os.listdir("/dev/shm")) <= shared_memory_before
