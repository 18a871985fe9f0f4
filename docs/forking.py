"""Starts Python programs as forks of one process that has imported modules that take long to
import, such as torch.

    python docs/forking.py serve SOCKET MODULE ...    imports them, prints a line, and waits there
    python docs/forking.py ask SOCKET FILE WORD ...   does what `python FILE WORD ...` does

The second gives the program its folder, environment and standard streams, passes on the signals
that it gets, and ends as the program ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from multiprocessing import connection
from typing import Any

MOST_BYTES = 1 << 17  # of arguments and environment
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


# -- at the process that forks ---------------------------------------------------------------------
def serve(path: str, modules: list[str]) -> None:
    """Forks for everyone who asks, until its own standard input ends."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()  # the forks' collectors write to no page that all share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(16)
        print("listening", flush=True)
        while sys.stdin not in connection.wait([listening, sys.stdin]):
            asking, _ = listening.accept()
            if os.fork() == 0:
                listening.close()
                attend(asking)
            asking.close()


def attend(asking: socket.socket) -> None:
    """Forks the program, and looks after it until its end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words, streams, _, _ = socket.recv_fds(asking, MOST_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        asking.close()
        run(json.loads(words), streams)
    for stream in streams:
        os.close(stream)
    end, watched = os.pidfd_open(pid), [asking]
    while end not in (ready := connection.wait([end, *watched])):
        number = ready[0].recv(1)
        if number:
            os.kill(pid, number[0])
        else:  # who asked was killed
            os.killpg(pid, signal.SIGKILL)
            watched = []
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if watched:
        asking.send(str(status).encode())
    os._exit(0)


def run(asked: dict[str, Any], streams: list[int]) -> None:
    """Runs the program in this process, as if Python had been started with its file."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.setsid()
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.argv = asked["words"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    status: object = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As Python ends, but the modules are left as they are: to take them down, all that this process
    # shares with others would be copied first.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(status if isinstance(status, int) else 1)


# -- at the process that asks ----------------------------------------------------------------------
def ask(path: str, words: list[str]) -> None:
    """Ends with the status of the program, or by the signal that ended it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(path)
        asked = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(asking, [json.dumps(asked).encode()], [0, 1, 2])
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: asking.send(bytes([number])))
        status = int(asking.recv(16))
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2], sys.argv[3:])
    else:
        ask(sys.argv[2], sys.argv[3:])
