"""The programs of a fault campaign (`chaos.py`): routers and nodes as users start them, with a pool that obeys orders.

    python -m headwater.lab.chaos.chaos_node      then one line of JSON for each program, on its input

This process loads what all of them need, and forks one for each line: a killed node is back in a moment, and is a
process of its own all the same. It says when one of its children has ended, and ends them all when its input ends. It
has no thread, opens nothing and computes nothing itself.

A child is `headwater ARGUMENTS`; pools that `build.stores` opens in it are haunted (`chaos_store.py`). `spoil` is for
the control: every block that was read is changed *behind* its verification, so answers must become wrong; `leak`: some
requests never give their slots back.
"""

import ctypes
import json
import os
import random
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, Final, NoReturn

from headwater.build import stores
from headwater.lab.chaos.chaos_store import FaultOrders, haunt
from headwater.storage.base import Store

_PR_SET_PDEATHSIG: Final = 1
_LOOK_S: Final = 0.02

_libc: Final = ctypes.CDLL(None)


def _say(**what: object) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def _haunt_pools(orders: FaultOrders, seed: int) -> None:
    """Whatever pool this process opens obeys."""
    real = stores.open_pool

    def open_pool(*arguments: Any, **options: Any) -> Store:
        return haunt(real(*arguments, **options), orders, seed=seed)

    setattr(stores, "open_pool", open_pool)  # noqa: B010  the hook that no user has


def _spoil_loads() -> None:
    from headwater.transfer.executor import staging

    class Spoiling(staging.TorchStaging):
        """Turns the sign of what it wrote to the device, before anybody hears of it."""

        def __init__(self, device: Any, *arguments: Any, **more: Any) -> None:
            super().__init__(device, *arguments, **more)
            write = self.engine.scatter

            def scatter(frames: Any, slots: Any, *, expected: Any = None, on_over: Any = None, **_: Any) -> Any:
                transfer = write(frames, slots, expected=expected)
                transfer.wait()
                for plane in device.flat:
                    plane[list(slots)] = -plane[list(slots)]
                if on_over is not None:
                    on_over()
                return transfer

            setattr(self.engine, "scatter", scatter)  # noqa: B010

    setattr(staging, "TorchStaging", Spoiling)  # noqa: B010


def _leak_slots() -> None:
    from headwater.engine.connector import Connector

    real = Connector.release

    def release(self: Any, request: Any) -> None:
        if len(request.prompt) % 16 != 1:
            real(self, request)

    setattr(Connector, "release", release)  # noqa: B010


def _child(what: dict[str, Any]) -> NoReturn:
    """Be a program."""
    code = 1
    directory = Path(what["directory"])
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(directory / f"{what['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        random.seed()
        _haunt_pools(FaultOrders(directory, what["name"]), what["seed"])
        if "spoil" in what["inject"]:
            _spoil_loads()
        if "leak" in what["inject"]:
            _leak_slots()
        from headwater.cli import app

        app(what["arguments"], standalone_mode=False)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  its last words
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _say(ended=pid, code=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Fork whoever is asked for."""
    import torch

    import headwater.cli
    import headwater.engine.engine
    import headwater.engine.handoffs
    import headwater.engine.loader
    import headwater.router.start
    import headwater.serve.start  # noqa: F401  what takes long, once

    torch.set_num_threads(1)
    children: set[int] = set()
    rest = b""
    _say(ready=os.getpid())
    try:
        while True:
            readable, _, _ = select.select([0], [], [], _LOOK_S)
            _reap(children)
            if not readable:
                continue
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    _child(json.loads(line))
                children.add(pid)
                _say(started=pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
