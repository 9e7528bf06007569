"""SaveThrottle: saves pause while the engine launches a step.

An engine that launches a step needs the interpreter, and the device stands still until it has it. Writing blocks to
stores needs the interpreter too, and can be done a moment later, while the engine waits for the device. So the engine
says when it launches, and a save looks here before each of its slices.

Nothing is promised: a save goes on after `MOST_S`, whatever the engine does.
"""

import threading
from typing import Final

MOST_S: Final = 0.05  # that one slice waits


class SaveThrottle:
    """Between one engine and the threads that write for it. Never on for long."""

    def __init__(self) -> None:
        self._off = threading.Event()
        self._off.set()

    def set(self, *, on: bool) -> None:
        """Have saves pause, or go on. Does not block."""
        if on:
            self._off.clear()
        else:
            self._off.set()

    def wait(self) -> None:
        """Wait while it is on. Blocks, for `MOST_S` at most."""
        self._off.wait(MOST_S)
