"""Digest of a checkpoint's files: whose weights computed a block's bytes (rule 6), not what somebody calls them.

    digest = SHA-256( "headwater/vllm-weights/1" ‖ for each weight file, sorted by name: u32 len(name) ‖ name
                    ‖ u64 size ‖ SHA-256(its content) )

Every byte of every weight file in the directory counts, also of those that vLLM did not load; where the files lie does
not. Hashing hundreds of gigabytes takes minutes, so a file's digest is remembered, by its inode, size and times of
change: the inode's own time of change cannot be set by a user, so a file that was replaced or written to is hashed
again. What is remembered is as safe as the user's own cache directory.

    python -m headwater.integrations.vllm.weights DIR

digests a checkpoint beforehand, so that vLLM's first start with it does not have to.

Not covered: weights that were made up (`load_format=dummy`), or changed after they were loaded (in-place updates of
reinforcement learning): there the connector refuses, or is told to start anew.
"""

import fcntl
import hashlib
import json
import os
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from headwater.config.environment import cache_directory
from headwater.core.errors import InvalidConfig

_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
_CHUNK: Final = 8 << 20
_READERS: Final = 4
_REMEMBERED: Final = 4096  # files, of which the digest is kept


def weights_digest(directory: Path, remember: Path | None) -> bytes:
    """Digest of all weight files of a directory. Blocks while they are read. Raises InvalidConfig if there is none.

    `remember`: a file of our own that keeps digests of files that did not change; None: nothing is kept.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file())
    if not files:
        raise InvalidConfig(f"{directory} holds no weights ({', '.join(_SUFFIXES)}): nobody could say whose KV it is")
    with _remembering(remember) as known, ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
        contents = list(pool.map(lambda path: _content(path, known), files))
    total = hashlib.sha256(b"headwater/vllm-weights/1")
    for path, content in zip(files, contents, strict=True):
        name = path.name.encode()
        total.update(struct.pack("<I", len(name)) + name + struct.pack("<Q", path.stat().st_size) + content)
    return total.digest()


def remembered() -> Path:
    """Where digests are kept between starts."""
    return cache_directory() / "weights.json"


def file_digest(path: Path) -> bytes:
    """SHA-256 of a file's content."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            found.update(chunk)
    return found.digest()


def adapter_digest(directory: Path) -> bytes:
    """Digest of an adapter's directory: every file in it, weights and configuration. Blocks. Raises InvalidConfig."""
    files = sorted(path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else []
    if not files:
        raise InvalidConfig(f"{directory} holds no adapter")
    total = hashlib.sha256(b"headwater/vllm-adapter/1")
    for path in files:
        name = str(path.relative_to(directory)).encode()
        total.update(struct.pack("<I", len(name)) + name + file_digest(path))
    return total.digest()


def _content(path: Path, known: dict[str, str]) -> bytes:
    """A file's digest: remembered, if nothing changed since it was made, and while it was."""
    before = _state(path)
    if before in known:
        return bytes.fromhex(known[before])
    content = file_digest(path)
    if _state(path) != before:
        raise InvalidConfig(f"{path} changed while it was read")
    known[before] = content.hex()
    return content


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}:{found.st_size}:{found.st_mtime_ns}:{found.st_ctime_ns}"


@contextmanager
def _remembering(path: Path | None) -> Iterator[dict[str, str]]:
    """What is remembered; written down at the end. One process at a time: the others find it done."""
    if path is None:
        yield {}
        return
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = _read(file.read())
        before = dict(known)
        yield known
        if known != before:
            file.seek(0)
            file.truncate()
            json.dump(dict(list(known.items())[-_REMEMBERED:]), file)


def _read(text: str) -> dict[str, str]:
    """What was written down; nothing, if that is damaged."""
    try:
        found = json.loads(text)
        return {str(state): str(digest) for state, digest in found.items() if len(bytes.fromhex(str(digest))) == 32}
    except (ValueError, AttributeError):
        return {}


def main() -> None:
    """The command above: prints the digest."""
    sys.stdout.write(weights_digest(Path(sys.argv[1]), remembered()).hex() + "\n")


if __name__ == "__main__":
    main()
