"""`serve run` that ends when an application cannot be deployed, and says why in one line.

    python -m deployment.serve_run [arguments of serve run]

By itself `serve run FILE` goes on with nothing to serve. Applications that run and fail later are Serve's to restore.
"""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from typing import Final

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus
from ray.serve.scripts import cli

_POLL_S: Final = 0.5
_EXCEPTION: Final = re.compile(r"^(?:\w+\.)*(?=\w+(?:Error|Exception): )", re.MULTILINE)
"""Where a traceback's last line begins; without the module of the exception."""
EXIT_STATUS: Final = 1
"""Of a process whose application could not be deployed."""


def main() -> None:
    """Run `serve run` on this thread, beside one that watches the applications come up."""
    failures: list[str] = []
    threading.Thread(target=_watch, args=(failures,), name="watch-deployment", daemon=True).start()
    try:
        cli(["run", *sys.argv[1:]])
    finally:
        if failures:
            ray.shutdown()  # no log of a worker comes after the cause
            sys.stderr.write(f"hotset does not start: {failures[0]}\n")
            sys.exit(EXIT_STATUS)


def _watch(failures: list[str]) -> None:
    """Wait until all applications run; end `serve run` as Ctrl-C does if one cannot."""
    while True:
        time.sleep(_POLL_S)  # between polls: Serve has no call that waits for applications of a config file
        if not ray.is_initialized():
            continue
        applications = serve.status().applications.values()
        failed = [a for a in applications if a.status == ApplicationStatus.DEPLOY_FAILED]
        if failed:
            deployments = failed[0].deployments.values()
            failures.append(cause_of("\n".join([failed[0].message, *(d.message for d in deployments)])))
            signal.raise_signal(signal.SIGINT)
            return
        if applications and all(a.status == ApplicationStatus.RUNNING for a in applications):
            return


def cause_of(message: str) -> str:
    """The exception that the last traceback in Serve's message ends with, as one line; the message if it has none."""
    exceptions = re.split(_EXCEPTION, message)
    return " ".join(exceptions[-1].split())


if __name__ == "__main__":
    main()
