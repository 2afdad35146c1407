"""Tasks of a worker that does to itself what bad kernels do, for tests of what survives it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

from tilecast.validation.lab.worker.serve import serve


class LostContext:
    """Stands for torch: a fault leaves no context to synchronise."""

    def __init__(self) -> None:
        self.cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=self._synchronize)
        self.faulted = False

    def _synchronize(self) -> None:
        if self.faulted:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


TORCH = LostContext()
sys.modules["torch"] = TORCH


def act(what: str) -> None:
    """Do what a kernel of that name does."""
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "exit":
        sys.stderr.write("some library\nlast words\n")
        sys.stderr.flush()
        os._exit(3)
    if what == "hang":
        time.sleep(600)
    if what == "fault":
        TORCH.faulted = True
    if what == "wrong" or TORCH.faulted:
        raise ValueError("wrong output" if what == "wrong" else "CUDA error: an illegal memory access was encountered")


def do(request, tell):
    """Act once; ``tell`` first where asked to."""
    if request.get("tell"):
        tell(request["tell"], 0.5)
    act(request["what"])
    return {"pid": os.getpid()}


def check(request, _tell):
    """The task of that name, for items whose variant says what they do when they are checked."""
    act(request["item"]["variant"].removeprefix("check "))
    return {"reason": "slightly wrong" if request["item"]["variant"] == "check inexact" else ""}


def measure(request, tell):
    """The task of that name: a line a timed item in the table, with the process and the turn it was timed in."""
    failed, done = [], []
    for index, item in enumerate(request["items"]):
        tell(str(index), 0.0)
        what, _, where = item["variant"].partition(" in turn")
        try:
            if not where:
                act(what)
            done.append(index)
        except ValueError as error:
            if TORCH.faulted:
                raise
            failed.append([index, str(error)])
    for index in done:
        tell(str(index), 0.0)
        what, _, where = request["items"][index]["variant"].partition(" in turn")
        if where:
            act(what)
    with Path(request["table"]).open("a") as table:
        for index in done:
            table.write(f"{request['items'][index]['variant']},{os.getpid()},{len(done)}\n")
    return {"failed": failed}


if __name__ == "__main__":
    serve({"do": do, "check": check, "measure": measure})
