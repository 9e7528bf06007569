"""Whether a server is there, without asking its client: that one waits for seconds, and some of its calls hold the GIL.

A `Watch` keeps one idle connection. When the server's process ends, the kernel closes it, and the next look sees that
at once. `knock` asks more: a server that runs hangs up on who does not speak its language; one that is stopped does
not. Neither proves that the next call succeeds.
"""

import contextlib
import socket
import threading
from typing import Final

_KNOCK: Final = bytes(64)


class Watch:
    """An idle connection to HOST:PORT, made anew when it is gone. Calls may come from several threads."""

    def __init__(self, host: str, port: int) -> None:
        """Connects when first asked."""
        self.where = (host, port)
        self._lock = threading.Lock()
        self.num_lines = 0  # connections so far: one more, and who listens may be another process
        self._line: socket.socket | None = None
        self._closed = False

    def up(self, timeout_s: float) -> bool:
        """Whether somebody listens there. Takes microseconds while the connection lasts, else up to `timeout_s`."""
        with self._lock:
            if self._line is not None:
                if _quiet(self._line):
                    return True
                self._line.close()
                self._line = None
            if self._closed or timeout_s <= 0:
                return False
            try:
                self._line = socket.create_connection(self.where, timeout=timeout_s)
            except (OSError, UnicodeError):  # the latter for a name that cannot be looked up, here and below
                return False
            self._line.settimeout(0)
            self.num_lines += 1
            return True

    def close(self) -> None:
        """Hang up. Idempotent."""
        with self._lock:
            self._closed = True
            if self._line is not None:
                self._line.close()
                self._line = None


def _quiet(line: socket.socket) -> bool:
    try:
        return bool(line.recv(1, socket.MSG_PEEK))
    except BlockingIOError:
        return True
    except OSError:
        return False


def nobody_listens(host: str, port: int, timeout_s: float) -> bool:
    """Whether no process has this port any more. In doubt, one has. Blocks up to `timeout_s`."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):
        return False
    return False


def knock(host: str, port: int, timeout_s: float) -> str | None:
    """None if a server at this address runs and answers; else what is wrong, in words. Blocks up to `timeout_s`."""
    try:
        line = socket.create_connection((host, port), timeout=timeout_s)
    except ConnectionRefusedError:
        return f"nobody listens at {host}:{port}"
    except (OSError, UnicodeError) as error:
        return f"{host}:{port} cannot be reached ({error})"
    with line:
        try:
            line.sendall(_KNOCK)
            with contextlib.suppress(ConnectionError):  # hung up before all was read
                line.recv(1)
        except TimeoutError:
            return f"who listens at {host}:{port} does not answer: it is stopped, or overloaded"
        except ConnectionError:
            return None
        except OSError as error:
            return f"{host}:{port}: {error}"
    return None
