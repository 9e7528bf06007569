"""A process that reads bodies for a server (`readers.py`): one at a time, until the server closes the socket.

    python -P -m headwater.serve.reader_process FD OPTIONS

OPTIONS is JSON: {"memory_bytes"}, and for a node also {"directory", "digest"} and what `Reader` is made with. The
digest is of the directory's small files: one that has changed since the server started would be another tokenizer.

It ends with its server. Its memory is bounded; what a large body took goes back to the machine after each.
"""

import ctypes
import gc
import hashlib
import json
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from io import BufferedIOBase
from pathlib import Path
from typing import Any, Final, TypeAlias

from headwater.core.errors import HeadwaterError, InvalidInput
from headwater.engine.tokenizer import Tokenizer
from headwater.serve.errors import ApiError, too_large_to_read
from headwater.serve.readers import FAILED, READ, REFUSED, SIZE
from headwater.serve.reading import Reader, large_routable

_Calls: TypeAlias = Mapping[str, Callable[..., object]]

_NICE: Final = 5  # others' answers come first
_PR_SET_PDEATHSIG: Final = 1
_TRIM_BYTES: Final = 1 << 20  # a body from which on memory is given back


def directory_digest(directory: Path) -> str:
    """A digest of what a tokenizer is made of: all JSON and templates of a model's directory."""
    found = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".jinja") and path.is_file():
            content = path.read_bytes()
            found.update(f"{path.name}/{len(content)}/".encode() + content)
    return found.hexdigest()


def main() -> None:
    """Read until the socket is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server gets it too, and ends us
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "prctl"):  # Linux; elsewhere it ends when it is done with a body
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.nice(_NICE)
    with socket.socket(fileno=int(sys.argv[1])) as ours, ours.makefile("rwb") as stream:
        told = _next(stream)
        if told is None:
            return  # nobody wants it
        options = json.loads(told)
        resource.setrlimit(resource.RLIMIT_DATA, (options["memory_bytes"], options["memory_bytes"]))
        load = cache(lambda: _calls(options))
        with suppress(HeadwaterError):  # a body will be answered with it
            load()
        while (num_bytes := _answer_one(stream, load)) is not None:
            if num_bytes >= _TRIM_BYTES:
                gc.collect()
                if hasattr(libc, "malloc_trim"):  # glibc keeps it otherwise
                    libc.malloc_trim(0)


def _calls(options: Mapping[str, Any]) -> _Calls:
    """What can be asked for."""
    if "directory" not in options:
        others = import_module(options["reads"]).READS if "reads" in options else {}
        return {"routable": large_routable, **others}
    directory = Path(options["directory"])
    if directory_digest(directory) != options["digest"]:
        raise InvalidInput(f"{directory} is not what it was when the server started: start the server again")
    reader = Reader(
        Tokenizer.load(directory),
        **{name: options[name] for name in ("model", "max_tokens", "max_chars", "max_answers", "vocab_size")},
    )
    return {"question": reader.question, "envelope": reader.envelope}


def _next(stream: BufferedIOBase) -> bytes | None:
    """The next message. None: there are no more."""
    head = stream.read(SIZE.size)
    return stream.read(*SIZE.unpack(head)) if len(head) == SIZE.size else None


def _answer_one(stream: BufferedIOBase, load: Callable[[], _Calls]) -> int | None:
    """Answer the next message; its bytes. None: there are no more."""
    message = _next(stream)
    if message is None:
        return None
    what, arguments = pickle.loads(message)  # noqa: S301  from the server that started us
    answer = pickle.dumps(_read(load, what, arguments))
    stream.write(SIZE.pack(len(answer)) + answer)
    stream.flush()
    return len(message)


def _read(load: Callable[[], _Calls], what: str, arguments: tuple[Any, ...]) -> tuple[str, object]:
    try:
        try:
            return READ, load()[what](*arguments)
        except MemoryError as error:
            raise too_large_to_read() from error
    except ApiError as error:
        told = {"param": error.param, "code": error.code, "kind": error.kind, "headers": error.headers}
        return REFUSED, {"status": error.status, "message": str(error), **told}
    except Exception:  # noqa: BLE001  told to the server, whose request fails with it, as it would there
        return FAILED, traceback.format_exc()


if __name__ == "__main__":
    main()
