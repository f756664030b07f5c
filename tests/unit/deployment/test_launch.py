import os
import signal
import subprocess
import sys

import pytest

from deployment import launch


@pytest.fixture
def executed(monkeypatch):
    """The arguments and environments of the `exec` that the launcher ends with."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, env: calls.append((arguments[1:], env)))
    monkeypatch.setattr(launch, "end_with_parent", lambda: None)
    return calls


def test_it_runs_serve_run_on_the_default_file(executed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch"])
    for name in launch.LOCAL_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    launch.main()
    [(arguments, environment)] = executed
    assert arguments == ["run", "serve_config.yaml"]
    assert environment == os.environ | launch.LOCAL_ENVIRONMENT


def test_what_the_user_has_set_wins(executed, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "my.yaml", "--app-dir", "apps"])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    launch.main()
    [(arguments, environment)] = executed
    assert arguments == ["run", "my.yaml", "--app-dir", "apps"]
    assert environment["RAY_AUTH_MODE"] == "token"


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_a_killed_parent_takes_the_launched_process_with_it_through_an_exec():
    child = (
        "import os, sys; from deployment.launch import end_with_parent; end_with_parent(); "
        "os.execv(sys.executable, [sys.executable, '-c', 'import time; print(\"up\", flush=True); time.sleep(60)'])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"],
        stdout=subprocess.PIPE,
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.send_signal(signal.SIGKILL)
        assert parent.stdout.read() == b""  # the end of the pipe: its last writer, the child, is gone as well
