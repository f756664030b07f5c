"""`python -m deployment.launch` as a user runs it: it answers, and leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from kernels.formats import UE8M0_NAN
from tests.e2e.test_serve import is_healthy, wait_until

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 90.0
"""To serve, or to give up. Alone on two cores it takes 25 s; tests run beside other things."""
MAX_IDLE_BYTES = 6 * 2**30
BODY = {"model": "deepseek-v4.1-flash", "prompt": "hi", "max_tokens": 3}


def write_config(path: Path, checkpoint: Path, port: int) -> Path:
    """`serve_config.yaml` with another port and a checkpoint that is already written."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    config["applications"][0]["args"]["checkpoint"] = str(checkpoint)
    path.write_text(yaml.safe_dump(config))
    return path


def listening_addresses(processes: list[psutil.Process]) -> set[str]:
    sockets = [c for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    return {socket.laddr.ip.removeprefix("::ffff:") for socket in sockets}  # IPv4 seen through an IPv6 socket


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
def test_nothing_is_left_however_it_ends(
    end: signal.Signals, checkpoint_directory: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    base_url = f"http://127.0.0.1:{port}"
    config = write_config(tmp_path / "config.yaml", checkpoint_directory, port)
    shared_memory = set(os.listdir("/dev/shm"))
    with running_server(config, tmp_path / "log") as server:
        wait_until(lambda: is_healthy(base_url), f"healthy; see {tmp_path / 'log'}", START_DEADLINE_S)
        assert httpx.post(f"{base_url}/v1/completions", json=BODY, timeout=60).status_code == 200
        family = psutil.Process(server.pid).children(recursive=True)
        assert sum(process.memory_full_info().pss for process in family) < MAX_IDLE_BYTES
        assert listening_addresses(family) == {"127.0.0.1"}
        if end is signal.SIGINT:
            os.killpg(server.pid, end)  # as a terminal does
        else:
            server.send_signal(end)
        server.wait(60)
        wait_until(lambda: not any(p.is_running() for p in family), f"all gone: {family}", deadline_s=30)
    assert set(os.listdir("/dev/shm")) <= shared_memory


def corrupt_scale(checkpoint: Path) -> str:
    """Make one scale of an expert NaN, which only reading it shows. Returns: what names it."""
    name = "layers.3.ffn.experts.5.w2.scale"
    file = (
        checkpoint / json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"][name]
    )
    data = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    data[begin + json.loads(data[8:begin])[name]["data_offsets"][0] + 3] = UE8M0_NAN
    file.write_bytes(data)
    return f"{file}: tensor {name}: element [0, 3] is the ue8m0 code of NaN"


def truncate_shard(checkpoint: Path) -> str:
    """Cut the end of a shard off. Returns: what names it."""
    file = sorted(checkpoint.glob("*.safetensors"))[1]
    with file.open("r+b") as shard:
        shard.truncate(file.stat().st_size - 100)
    return f"{file}: tensor "


@pytest.mark.parametrize("damage", [corrupt_scale, truncate_shard])
def test_a_bad_checkpoint_ends_the_start_with_one_line_that_names_file_and_tensor(
    damage: Callable[[Path], str], checkpoint_directory: Path, tmp_path: Path
) -> None:
    checkpoint = shutil.copytree(checkpoint_directory, tmp_path / "checkpoint")
    cause = damage(checkpoint)
    config = write_config(tmp_path / "config.yaml", checkpoint, port=0)
    with running_server(config, tmp_path / "log") as server:
        assert server.wait(START_DEADLINE_S) == 1
    last_line = (tmp_path / "log").read_text().splitlines()[-1]
    assert last_line.startswith("hotset does not start: CheckpointError: ")
    assert cause in last_line


def test_plain_serve_run_serves_too(checkpoint_directory: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    config = write_config(tmp_path / "config.yaml", checkpoint_directory, port)
    serve_run = (str(Path(sys.executable).with_name("serve")), "run")
    with running_server(config, tmp_path / "log", serve_run) as server:
        base_url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_healthy(base_url), f"healthy; see {tmp_path / 'log'}", START_DEADLINE_S)
        assert httpx.post(f"{base_url}/v1/completions", json=BODY, timeout=60).status_code == 200
        os.killpg(server.pid, signal.SIGINT)
        server.wait(60)


@contextmanager
def running_server(
    config: Path, log: Path, command: Sequence[str] = (sys.executable, "-m", "deployment.launch")
) -> Iterator[subprocess.Popen[bytes]]:
    """The command in a session of its own, as in a terminal; what a failed test leaves of it is killed."""
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, str(config)],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            start_new_session=True,
            # A test run in the background ignores SIGINT, and its children would inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    family: list[psutil.Process] = []
    try:
        yield server
    finally:
        if server.poll() is None:
            family = psutil.Process(server.pid).children(recursive=True)
            server.kill()
            server.wait()
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
