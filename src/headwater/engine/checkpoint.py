"""The tensors of a model directory, single or sharded safetensors: headers first, contents when everything fits.

    weights digest = SHA-256( "headwater/weights/1" ‖ u32 num_tensors
                            ‖ for each tensor, sorted by name:
                                u32 len(name) ‖ name ‖ u32 len(dtype) ‖ dtype ‖ u32 num_dims ‖ num_dims x u64 dim
                                ‖ SHA-256(its bytes) )

Integers are little-endian, text is UTF-8, dtypes are called as safetensors calls them. The digest is of the tensors the
model uses, as they are in the files: neither how they are spread over files nor what else is in there changes it. It is
taken of the very copies that become the model (rule 4), and it is kept nowhere: a digest beside the weights would be
somebody's word.

Not here: what the tensors mean. Files are read through the `safetensors` package; nothing is unpickled.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from headwater.core.errors import InvalidInput, NotInstalled

try:
    from safetensors import SafetensorError, safe_open
except ModuleNotFoundError as error:
    raise NotInstalled("reading a model needs safetensors: pip install 'headwater[engine]'") from error

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

_FLOATS: Final = ("F32", "F16", "BF16")
_NAMED: Final = 5  # of the tensors in an error
_READERS: Final = 8


@dataclass(frozen=True)
class _TensorEntry:
    path: Path
    shape: tuple[int, ...]
    dtype: str


class Checkpoint:
    """The headers of a directory's safetensors. Raises InvalidInput for files that are missing or damaged."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._entries: dict[str, _TensorEntry] = {}
        expected = self._index()
        for path in sorted({directory / SINGLE} if expected is None else set(expected.values())):
            if not path.is_file():
                raise InvalidInput(f"{path} is missing; {INDEX} names it")
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    header = file.get_slice(name)
                    self._entries[name] = _TensorEntry(path, tuple(header.get_shape()), header.get_dtype())
        for name, path in (expected or {}).items():
            if name not in self._entries or self._entries[name].path != path:
                raise InvalidInput(f"{path} does not hold tensor {name}, as {INDEX} says")

    @property
    def names(self) -> frozenset[str]:
        """All tensors that are there."""
        return frozenset(self._entries)

    def dtype(self, name: str) -> str:
        """A tensor's dtype, as safetensors calls it."""
        return self._entries[name].dtype

    def check(self, wanted: Shapes, *, ignored: Callable[[str], bool]) -> None:
        """Refuse a checkpoint that is not exactly what a model wants; InvalidInput names what is wrong."""
        missing = wanted.keys() - self._entries.keys()
        if missing:
            raise InvalidInput(f"{self.directory} has no tensor {_some(missing)}")
        unexpected = {name for name in self._entries.keys() - wanted.keys() if not ignored(name)}
        if unexpected:
            raise InvalidInput(f"{self.directory} has tensors that this model does not use: {_some(unexpected)}")
        for name, shape in sorted(wanted.items()):
            entry = self._entries[name]
            if entry.shape != shape:
                raise InvalidInput(f"{self.directory}: tensor {name} has shape {entry.shape}, the config says {shape}")
            if entry.dtype not in _FLOATS:
                raise InvalidInput(
                    f"{self.directory}: tensor {name} is {entry.dtype}; weights are read as {', '.join(_FLOATS)}"
                )

    def read(self, dtypes: Mapping[str, torch.dtype], device: torch.device | None) -> tuple[dict[str, Tensor], bytes]:
        """Read these tensors onto a device (None: nowhere), each as its dtype, and digest what was read. Blocks."""
        names = sorted(dtypes)
        with ExitStack() as stack:
            paths = {self._entries[name].path for name in names}
            files = {path: stack.enter_context(_open(path)) for path in paths}

            def read(name: str) -> tuple[Tensor | None, bytes]:
                private = files[self._entries[name].path].get_tensor(name).clone(memory_format=torch.contiguous_format)
                digest = hashlib.sha256(private.reshape(-1).view(torch.uint8).numpy()).digest()
                return None if device is None else private.to(device, dtypes[name]), digest

            with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as pool:
                found = dict(zip(names, pool.map(read, names), strict=True))
        tensors = {name: tensor for name, (tensor, _) in found.items() if tensor is not None}
        return tensors, self._digest({name: digest for name, (_, digest) in found.items()})

    def _index(self) -> dict[str, Path] | None:
        """Which file holds which tensor; None: the single file holds all."""
        path = self.directory / INDEX
        if not path.is_file():
            if not (self.directory / SINGLE).is_file():
                raise InvalidInput(f"{self.directory} holds neither {SINGLE} nor {INDEX}")
            return None
        try:
            found = json.loads(path.read_bytes())["weight_map"]
            files = {str(name): str(file) for name, file in found.items()}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidInput(f"{path} is not an index of safetensors: {error!r}") from error
        for file in files.values():
            if Path(file).name != file:
                raise InvalidInput(f"{path} names {file!r}, which is not a file beside it")
        return {name: self.directory / file for name, file in files.items()}

    def _digest(self, contents: Mapping[str, bytes]) -> bytes:
        total = hashlib.sha256(b"headwater/weights/1" + struct.pack("<I", len(contents)))
        for name in sorted(contents):
            entry = self._entries[name]
            total.update(_text(name) + _text(entry.dtype))
            total.update(struct.pack(f"<I{len(entry.shape)}Q", len(entry.shape), *entry.shape) + contents[name])
        return total.digest()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise InvalidInput(f"{path} is not a safetensors file: {error}") from error


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    rest = f" and {len(ordered) - _NAMED} more" if len(ordered) > _NAMED else ""
    return ", ".join(ordered[:_NAMED]) + rest
