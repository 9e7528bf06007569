"""Block keys: golden values, an independent encoder, chaining, extras, every sort of token input."""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwater.core import keys
from headwater.core.errors import InvalidInput, InvalidTokens
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, as_tokens, block_keys

ROOT = BlockKey(bytes(range(32)))
IMAGE = Extra("image", b"\x11" * 32, 6, 5)
AUDIO = Extra("audio", b"\x22" * 16, 2, 1)

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
EXTRAS = st.lists(
    st.builds(
        Extra,
        kind=st.sampled_from(["image", "audio", "ü"]),
        digest=st.binary(min_size=16, max_size=33),
        start=st.integers(0, 50),
        length=st.integers(1, 20),
    ),
    max_size=5,
)


def independent_keys(tokens: Sequence[int], parent: bytes, block: int, extras: Sequence[Extra] = ()) -> list[bytes]:
    """The module's docstring, spelt out token by token; always with the tail."""
    found = []
    for first in range(0, len(tokens), block):
        ids = tokens[first : first + block]
        inside = [e for e in extras if any(e.start <= first + i < e.start + e.length for i in range(len(ids)))]
        message = parent + struct.pack("<I", len(ids)) + struct.pack("<I", len(inside))
        for token in ids:
            message += struct.pack("<I", token)
        for e in sorted(inside, key=lambda e: (e.start, e.length, e.kind, e.digest)):
            kind = e.kind.encode("utf-8")
            message += struct.pack("<I", len(kind)) + kind + struct.pack("<I", len(e.digest)) + e.digest
            message += struct.pack("<QQ", e.start, e.length)
        parent = hashlib.sha256(message).digest()
        found.append(parent)
    return found


def test_golden_values() -> None:
    assert [k.hex() for k in block_keys(range(10), parent=ROOT, block_tokens=4, tail=True)] == [
        "9a77f7dcda28ad3bbe9dbc650322622db6f25009c88587114dbbdd1b4920c049",
        "ac7e5a7fb8ad4298724435dd5e6d966e726e4f19ef25293909f39cf650dd9e95",
        "b8632afe1e698388aec5e248376df64ceef17f290d924ef3d0f48cd220912d96",
    ]
    assert [k.hex() for k in block_keys(range(10), parent=ROOT, block_tokens=4, extras=[IMAGE, AUDIO], tail=True)] == [
        "e60cdd99a08bee35f8245c0c97da588ca550751cb4d64c52239a5834678b844f",
        "9e5cd0236d59656318502911c4b9038085872a4f13404f61cccfe550fef9e114",
        "2eede38971b225edb46f8eb0b5ed736308f6b26d941c9cc53d0c2607d613991e",
    ]
    identity = CacheIdentity(model="m", weights=b"w" * 32, config=b"c" * 32, layout=b"l" * 32, block_tokens=2)
    assert [k.hex() for k in block_keys([2**32 - 1, 0], parent=identity.root, block_tokens=2)] == [
        "beab4f23d9f0e52b93758037a8fa05ddfced77c9575a6d92e9f345b1197b8d31",
    ]


@given(TOKENS, st.integers(1, 9), EXTRAS)
def test_encoding_is_the_documented_one(tokens: list[int], block: int, extras: list[Extra]) -> None:
    expected = independent_keys(tokens, ROOT, block, extras)
    assert block_keys(tokens, parent=ROOT, block_tokens=block, extras=extras, tail=True) == expected
    assert block_keys(tokens, parent=ROOT, block_tokens=block, extras=extras) == expected[: len(tokens) // block]


@given(TOKENS, st.integers(1, 9), EXTRAS, st.data())
def test_a_chain_can_be_extended(tokens: list[int], block: int, extras: list[Extra], data: st.DataObject) -> None:
    whole = block_keys(tokens, parent=ROOT, block_tokens=block, extras=extras, tail=True)
    known = data.draw(st.integers(0, len(tokens) // block))
    parent = whole[known - 1] if known else ROOT
    start = known * block
    more = block_keys(tokens[start:], parent=parent, block_tokens=block, start=start, extras=extras, tail=True)
    assert whole[:known] + more == whole


@given(st.lists(st.integers(0, 99), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 60), st.data())
def test_prompts_that_differ_in_an_image_part_at_its_first_token(
    tokens: list[int], block: int, length: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(tokens) - 1))
    prompts = [
        block_keys(tokens, parent=ROOT, block_tokens=block, extras=extras, tail=True)
        for extras in ([], [Extra("image", b"a" * 16, start, length)], [Extra("image", b"b" * 16, start, length)])
    ]
    first = start // block
    for prompt in prompts[1:]:
        assert prompt[:first] == prompts[0][:first]
    for triple in list(zip(*prompts, strict=True))[first:]:
        assert len(set(triple)) == 3


def test_an_extra_spanning_blocks_enters_each_of_them() -> None:
    # Hash each block under one parent, so that only its own content can tell.
    plain, other = Extra("image", b"a" * 16, 3, 6), Extra("image", b"b" * 16, 3, 6)
    for start in (0, 4, 8):
        one, two = (
            block_keys(range(4), parent=ROOT, block_tokens=4, start=start, extras=[extra]) for extra in (plain, other)
        )
        assert one != two
    assert block_keys(range(4), parent=ROOT, block_tokens=4, start=12, extras=[plain]) == block_keys(
        range(4), parent=ROOT, block_tokens=4, start=12, extras=[other]
    )


def test_where_an_extra_begins_counts_even_inside_one_block() -> None:
    found = {
        block_keys([7] * 4, parent=ROOT, block_tokens=4, extras=[Extra("image", b"a" * 16, start, length)])[0]
        for start, length in ((0, 1), (1, 1), (0, 2), (1, 2))
    }
    assert len(found) == 4


def test_partial_and_full_blocks_never_share_a_key() -> None:
    zeros = [block_keys([0] * n, parent=ROOT, block_tokens=8, tail=True)[0] for n in range(1, 9)]
    assert len(set(zeros)) == 8


def test_long_prompts_are_hashed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_CHUNK_BLOCKS", 3)
    tokens = list(range(50))
    extras = [Extra("image", b"a" * 16, 17, 9)]
    got = block_keys(tokens, parent=ROOT, block_tokens=4, extras=extras, tail=True)
    assert got == independent_keys(tokens, ROOT, 4, extras)


@pytest.mark.parametrize("dtype", ["i1", "u1", "<i2", ">i2", "<u4", ">u4", "<i4", "<i8", ">i8", "<u8"])
@pytest.mark.parametrize("step", [1, 3, -1])
def test_numpy_of_any_integer_dtype_and_stride(dtype: str, step: int) -> None:
    ids = np.arange(100).astype(dtype)[::step]
    got = as_tokens(ids)
    assert got.dtype == np.dtype("<u4")
    assert got.flags.c_contiguous
    assert np.array_equal(got, np.arange(100)[::step])
    assert block_keys(ids, parent=ROOT, block_tokens=7, tail=True) == independent_keys(got.tolist(), ROOT, 7)


@pytest.mark.parametrize(
    "tokens",
    [
        [5, 0, 1, 4294967295],
        (5, 0, 1, 4294967295),
        array("I", [5, 0, 1, 4294967295]),
        array("q", [5, 0, 1, 4294967295]),
        np.array([5, 0, 1, 4294967295]),
        [np.int64(5), np.uint8(0), 1, np.uint32(4294967295)],
        torch.tensor([5, 0, 1, 4294967295]),
        torch.tensor([[5, 9], [0, 9], [1, 9], [4294967295, 9]])[:, 0],
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_every_sort_of_input_is_the_same_tokens(tokens: Any) -> None:
    assert as_tokens(tokens).tolist() == [5, 0, 1, 4294967295]


def test_contiguous_u32_is_not_copied_and_may_be_read_only() -> None:
    ids = np.arange(8, dtype=np.uint32)
    ids.flags.writeable = False
    assert np.shares_memory(as_tokens(ids), ids)
    assert block_keys(ids, parent=ROOT, block_tokens=4) == independent_keys(range(8), ROOT, 4)


@pytest.mark.parametrize("tokens", [[], (), array("I"), np.empty(0, np.int64), torch.empty(0, dtype=torch.int64)])
def test_no_tokens_no_keys(tokens: Any) -> None:
    assert block_keys(tokens, parent=ROOT, block_tokens=4, extras=[IMAGE], tail=True) == []


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, -3], "index 2 is -3"),
        ([1, 2**32], "index 1 is 4294967296"),
        ([2**80], "index 0 is 1208925819614629174706176"),
        ([1, 2.0], r"index 1 is 2\.0"),
        ([1, "2"], "index 1 is '2'"),
        ([0, 1, True], "index 2 is True"),
        ([[1], [2]], r"index 0 is \[1\]"),
        ([None], "index 0 is None"),
        (array("q", [1, -1]), "index 1 is -1"),
        (array("d", [1.0]), "float64"),
        (np.array([3, -7, 1]), "index 1 is -7"),
        (np.array([3, 2**33], dtype=np.uint64), "index 1 is 8589934592"),
        (np.array([-1], dtype=np.int8), "index 0 is -1"),
        (np.array([1.0]), "float64"),
        (np.array([True]), "bool"),
        (np.array([1, None]), "object"),
        (np.array(3), "not 0"),
        (np.array([[1, 2]]), r"not 2 \(shape \(1, 2\)\)"),
        (torch.tensor([1.0]), "float32"),
        (torch.tensor([True]), "bool"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "Tensor cannot be read"),
        (torch.tensor([-1]), "index 0 is -1"),
        (b"\1\0\0\0", "not bytes"),
        (bytearray(4), "not bytearray"),
        (memoryview(b"\1\0\0\0"), "not memoryview"),
        ("1234", "not str"),
        ({1, 2}, "not set"),
        (iter([1]), "not list_iterator"),
        (7, "not int"),
        (None, "not NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refuses_what_is_no_token(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidTokens, match=message):
        block_keys(tokens, parent=ROOT, block_tokens=4)


@pytest.mark.parametrize(
    "options",
    [
        {"parent": b"short"},
        {"parent": "x" * 32},
        {"parent": bytearray(32)},
        {"block_tokens": 0},
        {"block_tokens": -4},
        {"block_tokens": 2**32},
        {"block_tokens": True},
        {"block_tokens": 4.0},
        {"start": 2},
        {"start": -4},
        {"start": True},
    ],
    ids=repr,
)
def test_refuses_what_is_no_chain(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        block_keys([1], **{"parent": ROOT, "block_tokens": 4, **options})


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": ""},
        {"kind": b"image"},
        {"kind": "\ud800"},
        {"digest": b"a name"},
        {"digest": "x" * 32},
        {"start": -1},
        {"start": 2**64},
        {"start": 1.0},
        {"length": 0},
        {"length": 2**64},
        {"length": True},
    ],
    ids=repr,
)
def test_refuses_what_is_no_extra(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="extra"):
        Extra(**{"kind": "image", "digest": b"d" * 32, "start": 0, "length": 1, **fields})


def test_arrays_never_become_lists() -> None:
    class Watched(np.ndarray[Any, Any]):
        def tolist(self) -> Any:
            raise AssertionError("tolist")

        def __iter__(self) -> Any:
            raise AssertionError("iter")

    ids = np.arange(9, dtype=np.int64).view(Watched)
    assert block_keys(ids, parent=ROOT, block_tokens=4, tail=True) == independent_keys(range(9), ROOT, 4)
