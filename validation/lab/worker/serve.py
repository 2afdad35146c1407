"""The side of a worker that computes: requests as lines of JSON on stdin, answers on stdout, until stdin ends.

Whatever a kernel that has not run before does (crash, lost context, hang), it does to this process and not to the run.
A module that calls `serve` is started as ``python -P -m MODULE``; it ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[[str, float], None]
#: What a worker can be asked, by name: (request, progress) -> answer.
Tasks = Mapping[str, Callable[[dict[str, Any], Tell], dict[str, Any]]]


def serve(tasks: Tasks) -> None:
    """Answer requests, each by the task that its "do" names, until stdin ends.

    A task that raises is answered with its error, and with "lost" where it left no GPU context to go on with.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to the log
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def answer(**line: object) -> None:
        try:
            answers.write(json.dumps(line) + "\n")
            answers.flush()
        except BrokenPipeError:  # no process is left to hear it
            os._exit(0)

    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(done=tasks[request["do"]](request, lambda text, share: answer(at=[text, share])))
        except Exception as error:  # everything a compiler, a driver or a kernel can raise is this request's failure
            answer(error=one_line(error), lost=gpu_is_lost())


def one_line(error: BaseException) -> str:
    """What an exception says, in one line of bounded length."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def gpu_is_lost() -> bool:
    """Whether a fault took this process's CUDA context: then every later call fails, whatever it asks for."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except Exception:  # torch has had several classes for it
        return True
    return False


def _end_with(parent: int) -> None:
    """Kill this process and its compilers when the one that started it is gone: no orphan may hold the GPU."""
    while os.getppid() == parent:
        time.sleep(0.25)
    os.killpg(os.getpgid(0), signal.SIGKILL)
