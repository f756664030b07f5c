import os
import signal
import subprocess
import sys

import pytest

from deployment import launch

linux = pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")

RUN = (
    "import os, sys; from deployment.launch import run; "
    "sys.exit(run([sys.executable, '-c', {code!r}], dict(os.environ)))"
)
"""A launcher of Python code."""

ORPHAN = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}], start_new_session=True)"
"""A process that ends and leaves another in a session of its own."""

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


def start(code: str) -> subprocess.Popen[bytes]:
    """Python code in a process whose output tells when its last descendant has ended."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        # Tests that run under nohup ignore SIGHUP, and so would the launcher.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def assert_all_end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    assert process.stdout.read() == b""  # the pipe ends with the last process that can write to it


@pytest.fixture
def run_calls(monkeypatch):
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch, "run", lambda command, environment: calls.append((command[1:], environment)))
    return calls


def test_it_runs_serve_on_the_default_file(run_calls, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch"])
    for name in launch.LOCAL_ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit):
        launch.main()
    [(arguments, environment)] = run_calls
    assert arguments == ["-m", "deployment.serve_run", "serve_config.yaml"]
    assert environment == os.environ | launch.LOCAL_ENVIRONMENT


def test_what_the_user_has_set_wins(run_calls, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["launch", "my.yaml", "--app-dir", "apps"])
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(SystemExit):
        launch.main()
    [(arguments, environment)] = run_calls
    assert arguments == ["-m", "deployment.serve_run", "my.yaml", "--app-dir", "apps"]
    assert environment["RAY_AUTH_MODE"] == "token"


@linux
@pytest.mark.parametrize("ending", ["sys.exit(7)", "import os; os.kill(os.getpid(), 9)"])
def test_orphans_end_with_the_command_whose_status_is_passed_on(ending):
    with start(RUN.format(code=f"{ORPHAN.format(code=SLEEP)}; {ending}")) as launcher:
        assert launcher.wait(timeout=30) == (7 if "exit" in ending else 128 + 9)
        assert launcher.stdout is not None
        assert launcher.stdout.read() in (b"", b"up\n")


@linux
def test_a_killed_parent_takes_the_command_and_its_orphans_with_it():
    command = RUN.format(code=f"{ORPHAN.format(code=SLEEP)}; import time; time.sleep(60)")
    with start(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {command!r}])") as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        parent.kill()
        assert_all_end(parent)


@linux
def test_a_killed_launcher_takes_the_command_with_it():
    with start(RUN.format(code=SLEEP)) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.kill()
        assert_all_end(launcher)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_termination_is_a_keyboard_interrupt_for_the_command(signum):
    code = f"try:\n {SLEEP}\nexcept KeyboardInterrupt:\n print('interrupted')\n raise SystemExit(3)"
    with start(RUN.format(code=code)) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.send_signal(signum)
        assert launcher.stdout.read() == b"interrupted\n"
        assert launcher.wait() == 3


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_does_not_end_in_time_is_killed(signum):
    code = f"try:\n {SLEEP}\nexcept KeyboardInterrupt:\n time.sleep(60)"
    shortened = RUN.format(code=code).replace(
        "from", "import deployment.launch as l; l.SHUTDOWN_TIMEOUT_S = 1; from"
    )
    with start(shortened) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == b"up\n"
        launcher.send_signal(signum)
        assert_all_end(launcher)
        assert launcher.wait() == 128 + 9
