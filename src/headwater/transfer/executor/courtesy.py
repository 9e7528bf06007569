"""Courtesy: work that nobody waits for stands back while the engine has a hurry of its own.

An engine that launches a step needs the interpreter, and the device stands still until it has it. Writing blocks to
stores needs the interpreter too, and can be done a moment later, while the engine waits for the device. So the engine
says when it is in a hurry, and a save looks here before each of its slices.

Nothing is promised: whoever stands back goes on after `MOST_S`, whatever the engine does.
"""

import threading
from typing import Final

MOST_S: Final = 0.05  # that one slice stands back


class Courtesy:
    """A gate between one engine and the threads that write for it. Never closed for long."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()

    def ask(self, *, hurry: bool) -> None:
        """Say that the engine is in a hurry, or that it is not any more. Does not block."""
        if hurry:
            self._open.clear()
        else:
            self._open.set()

    def wait(self) -> None:
        """Stand back while somebody is in a hurry. Blocks, for `MOST_S` at most."""
        self._open.wait(MOST_S)
