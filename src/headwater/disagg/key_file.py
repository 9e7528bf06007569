"""Where a fleet's key comes from: a file or a variable that somebody named, else this user's own file.

The user's own key is made when it is first needed, readable by nobody else, and stays. So the routers and nodes that
one user starts on one machine know each other without being told anything, and other users' processes are strangers to
them. No other machine has it: a fleet with such a key is on loopback only (`NodeKey.own`).
"""

import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from headwater.config import environment
from headwater.core.errors import InvalidConfig
from headwater.core.node_key import MAX_KEY_CHARS, NodeKey

log: Final = logging.getLogger("headwater")

_ENOUGH_BYTES: Final = MAX_KEY_CHARS + 2  # with the end of its line


def find_node_key(file: Path | None) -> NodeKey:
    """The key in `file`; without one, that of the environment; without that, this user's own. Raises InvalidConfig."""
    named = file or environment.default_node_key_file()
    if named is not None:
        return read_node_key(named)
    text = environment.default_node_key()
    if text is not None:
        return NodeKey(text)
    key = own_node_key(environment.own_node_key_file())
    log.info(
        "no node key is named (--node-key-file): this fleet is for processes of this user on loopback, and nobody else"
    )
    return key


def read_node_key(path: Path) -> NodeKey:
    """The key in a file, which must be closed to others. Raises InvalidConfig."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_ENOUGH_BYTES + 1)
    except OSError as error:
        raise InvalidConfig(f"the node key's file {path} cannot be read: {error.strerror}") from error
    if mode & (stat.S_IROTH | stat.S_IWOTH | stat.S_IWGRP):
        raise InvalidConfig(f"others may read or change the node key's file {path}: chmod 600 it, and make a new key")
    try:
        return NodeKey(content.decode("ascii").strip())
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path} holds no node key: it is not ASCII") from error
    except InvalidConfig as error:
        raise InvalidConfig(f"{path} holds no node key: {error}") from error


def write_node_key(path: Path, key: NodeKey) -> None:
    """Write a key where no file is, readable by us alone; it is there whole or not at all. Raises OSError."""
    number, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(number, "w", encoding="ascii") as file:
            file.write(key.text + "\n")
        os.link(name, path)  # fails where one is
    finally:
        os.unlink(name)


def own_node_key(path: Path) -> NodeKey:
    """This user's own key, made if there is none; another process may be doing the same. Raises InvalidConfig."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with suppress(FileExistsError):  # somebody else was faster: it is theirs that counts
                write_node_key(path, NodeKey.random())
        owner = path.stat().st_uid
    except OSError as error:
        raise InvalidConfig(
            f"no node key is named, and none can be kept in {path}: {error.strerror}; name one with --node-key-file"
        ) from error
    if owner != os.geteuid():
        raise InvalidConfig(f"{path} is another user's: remove it, or name a node key with --node-key-file")
    return NodeKey(read_node_key(path).text, own=True)
