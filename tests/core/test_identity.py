"""Cache identity: golden values, an independent encoder, and that every field counts."""

import hashlib
import pickle
import struct
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity, config_digest

W, C, L, D = (bytes([byte]) * 32 for byte in (1, 2, 3, 4))
PLAIN = CacheIdentity(model="m", weights=W, config=C, layout=L, block_tokens=64)
FULL = CacheIdentity(
    model="lläma",
    weights=W,
    config=C,
    layout=L,
    block_tokens=16,
    quantisation="int8-per-tensor",
    scales=D,
    adapter=D,
    tokenizer=D,
    processor=D,
    salt=b"tenant-a",
)
FIELDS = (
    "model",
    "weights",
    "config",
    "layout",
    "block_tokens",
    "quantisation",
    "scales",
    "adapter",
    "tokenizer",
    "processor",
)


def independent_digest(identity: CacheIdentity) -> bytes:
    out = bytearray(b"headwater/identity/1") + struct.pack("<I", len(FIELDS))
    for name in FIELDS:
        value = getattr(identity, name)
        raw = (
            struct.pack("<Q", value)
            if isinstance(value, int)
            else value.encode()
            if name in "model quantisation"
            else value
        )
        out += struct.pack("<I", len(name)) + name.encode() + struct.pack("<Q", len(raw)) + raw
    return hashlib.sha256(out).digest()


def independent_root(identity: CacheIdentity) -> bytes:
    message = b"headwater/root/1" + independent_digest(identity) + struct.pack("<I", len(identity.salt)) + identity.salt
    return hashlib.sha256(message).digest()


@pytest.mark.parametrize("identity", [PLAIN, FULL])
def test_encoding_is_the_documented_one(identity: CacheIdentity) -> None:
    assert identity.digest == independent_digest(identity)
    assert identity.root == independent_root(identity)


def test_golden_values() -> None:
    assert PLAIN.digest.hex() == "f216d26a9de886ba955bc6522f705e44b005e1e220f84d38950f841b81e6ba8f"
    assert PLAIN.root.hex() == "b79e40b390e37d463f7c748ee3318f01197966a4e017c3741a1a2607aca54710"
    assert FULL.digest.hex() == "0b9dd0ff2b379b80edeaa449a54c5cc6e8fdea1e0483a03ea3bece8c9f9311f3"
    assert FULL.root.hex() == "8e8636aba0d4d3686f3dca9fe8eeb2e1372e47eaac74b4604631205a8e4fdf1e"
    assert FULL.tenant.hex() == "075b09a06de2de9e5e7192cc4ecedc64"
    assert (
        config_digest({"rope": {"theta": 1e6, "type": "yarn"}, "heads": [8, 2]}).hex()
        == "3117bc3c00f9d75ea411c6f7a7c13602cfbf24cf047b370ec3e8e4315ce5f29a"
    )


CHANGES: dict[str, Any] = dict.fromkeys(("weights", "config", "layout"), D) | {
    "model": "n",
    "block_tokens": 65,
    "quantisation": "q",
    "scales": D,
    "adapter": D,
    "tokenizer": D,
    "processor": D,
}


def test_every_field_changes_digest_and_root() -> None:
    others = [replace(PLAIN, **{name: value}) for name, value in CHANGES.items()]
    assert set(CHANGES) == set(FIELDS)
    assert len({identity.digest for identity in (PLAIN, *others)}) == len(FIELDS) + 1
    assert len({identity.root for identity in (PLAIN, *others)}) == len(FIELDS) + 1


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_salt_parts_tenants_but_not_the_digest(one: bytes, two: bytes) -> None:
    a, b = replace(PLAIN, salt=one), replace(PLAIN, salt=two)
    assert a.digest == b.digest == PLAIN.digest
    assert (a.root == b.root) == (one == two)
    assert (a.tenant == b.tenant) == (one == two)
    assert len(a.tenant) == 16
    assert (a.tenant == bytes(16)) == (one == b"")


def test_the_salt_is_not_shown() -> None:
    assert "tenant-a" not in repr(FULL)


def test_values_are_equal_frozen_and_travel() -> None:
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    assert hash(replace(FULL)) == hash(FULL)
    with pytest.raises(FrozenInstanceError):
        FULL.model = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, value) for name in ("weights", "config", "layout") for value in (b"", b"x" * 31, b"x" * 33, "x" * 32)],
        *[(name, value) for name in ("scales", "adapter", "tokenizer", "processor") for value in (b"x", "", None)],
        *[("weights", bytearray(32)), ("salt", "tenant"), ("salt", None)],
        *[("model", value) for value in ("", b"m", "a\nb", "\ud800")],
        *[("quantisation", value) for value in (None, "\0")],
        *[("block_tokens", value) for value in (0, -1, 1 << 32, True, 64.0, "64")],
    ],
)
def test_refuses_what_is_no_identity(field: str, value: object) -> None:
    changed: dict[str, Any] = {field: value}
    with pytest.raises(InvalidInput, match=field):
        replace(PLAIN, **changed)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_config_digest_ignores_the_order_of_keys(config: dict[str, object]) -> None:
    assert config_digest(config) == config_digest(dict(reversed(config.items())))
    assert config_digest({**config, "rope_theta": 1.5}) != config_digest({**config, "rope_theta": 2.5})


@pytest.mark.parametrize(
    "config",
    [
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": {1: "b"}},
        {"a": [{None: 1}]},
        {"a": b"bytes"},
        {"a": {1, 2}},
        {2: "b"},
        [("a", 1)],
        "text",
    ],
)
def test_config_digest_refuses_what_has_no_canonical_json(config: Any) -> None:
    with pytest.raises(InvalidInput):
        config_digest(config)


def test_config_digest_refuses_a_circle() -> None:
    circle: dict[str, object] = {}
    circle["self"] = circle
    with pytest.raises(InvalidInput):
        config_digest(circle)
