"""Layouts: the shipped suite over every sample, exact shapes and golden fingerprints, and what is refused."""

import hashlib
import struct
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidLayout
from headwater.layout.dsa import dsa_layout, dsa_plain_layout
from headwater.layout.gqa import gqa_fp8_layout, gqa_layout
from headwater.layout.mla import mla_layout
from headwater.layout.spec import (
    INDEXER,
    KEY,
    KEY_SCALE,
    LATENT,
    VALUE,
    VALUE_SCALE,
    DType,
    KVLayout,
    Plane,
    PlaneRole,
    combine,
    declare_role,
    role,
)
from headwater.testing.layouts import LayoutTests
from headwater.testing.samples import sample_layouts

SAMPLES = sample_layouts()


class TestSamples(LayoutTests):
    @pytest.fixture(params=SAMPLES)
    def layout(self, request: pytest.FixtureRequest) -> KVLayout:
        return SAMPLES[request.param]


def names(layout: KVLayout) -> list[str]:
    return [plane.name for plane in layout.planes]


def test_flat_order_of_each_family() -> None:
    gqa = gqa_layout(num_layers=2, num_kv_heads=4, head_dim=8, block_tokens=16, dtype=DType.FP16)
    fp8 = gqa_fp8_layout(num_layers=1, num_kv_heads=4, head_dim=8, block_tokens=16)
    assert names(gqa) == ["key.0", "value.0", "key.1", "value.1"]
    assert names(fp8) == ["key.0", "value.0", "key_scale.0", "value_scale.0"]
    assert names(mla_layout(num_layers=2, block_tokens=16, layer_offset=5)) == ["latent.5", "latent.6"]
    assert names(dsa_layout(num_layers=2, block_tokens=16)) == ["key.0", "indexer.0", "key.1", "indexer.1"]


def test_shapes_and_sizes_of_each_family() -> None:
    fp8 = gqa_fp8_layout(num_layers=1, num_kv_heads=4, head_dim=128, block_tokens=64)
    assert [(p.shape, p.dtype, p.split) for p in fp8.planes] == [
        ((4, 64, 128), DType.FP8_E4M3, 0),
        ((4, 64, 128), DType.FP8_E4M3, 0),
        ((4, 64), DType.BF16, 0),
        ((4, 64), DType.BF16, 0),
    ]
    assert fp8.plane_bytes == (32768, 32768, 512, 512)
    assert fp8.offsets == (0, 32768, 65536, 66048)
    assert fp8.page_bytes == 66560

    mla = mla_layout(num_layers=1, block_tokens=64).planes[0]
    assert (mla.shape, mla.split, mla.num_bytes) == ((64, 576), None, 1152 * 64)

    key, indexer = dsa_layout(num_layers=1, block_tokens=64).planes
    assert (key.shape, key.dtype, key.split) == ((64, 656), DType.UINT8, None)
    assert (indexer.shape, indexer.dtype, indexer.split) == ((64, 132), DType.UINT8, None)
    assert dsa_layout(num_layers=1, block_tokens=1, index_dim=256).plane("indexer", 0).num_bytes == 264
    assert dsa_plain_layout(num_layers=1, block_tokens=64).plane_bytes == (64 * 576 * 2, 64 * 128 * 2)


def test_samples_cover_what_they_promise() -> None:
    assert any(size % 16 for size in SAMPLES["odd"].plane_bytes)
    assert SAMPLES["gqa-fp16-few-heads"].planes[0].shape[0] < 8
    assert {plane.split is None for plane in SAMPLES["mixed-gqa-mla"].planes} == {True, False}
    assert SAMPLES["gqa-draft"].num_layers == 5
    assert SAMPLES["gqa-draft"].plane("key", 4).shape == (2, 64, 64)
    assert len({layout.fingerprint for layout in SAMPLES.values()}) == len(SAMPLES) == 10


def test_fingerprint_is_the_documented_encoding() -> None:
    layout = gqa_layout(num_layers=1, num_kv_heads=2, head_dim=3, block_tokens=4, dtype=DType.BF16)
    mixed = combine(layout, mla_layout(num_layers=1, block_tokens=4, lora_rank=5, rope_dim=1, layer_offset=1))
    message = b"headwater/layout/1" + struct.pack("<II", 4, 3)
    for name in (b"key", b"value"):
        message += struct.pack("<I", len(name)) + name + struct.pack("<I", 0)
        message += struct.pack("<I", 4) + b"bf16" + struct.pack("<iiI", 0, 1, 3) + struct.pack("<III", 2, 4, 3)
    message += struct.pack("<I", 6) + b"latent" + struct.pack("<I", 1)
    message += struct.pack("<I", 4) + b"bf16" + struct.pack("<iiI", -1, 0, 2) + struct.pack("<II", 4, 6)
    assert mixed.fingerprint == hashlib.sha256(message).digest()
    assert mixed.fingerprint.hex() == "b645cad47bd81c269aba59064d2904742677613875be36532bbad4f042b4dd93"


def test_dtypes() -> None:
    sizes = {dtype.value: dtype.itemsize for dtype in DType}
    assert sizes == {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1}
    assert DType("bf16") is DType.BF16
    with pytest.raises(InvalidLayout, match="unknown dtype 'int4'; known are bf16"):
        DType("int4")


def test_roles() -> None:
    built_in = [KEY, VALUE, KEY_SCALE, VALUE_SCALE, LATENT, INDEXER]
    assert built_in == sorted(built_in, key=lambda one: one.priority)
    assert declare_role("key", KEY.priority) is role("key") is KEY
    for name, priority in (("key", 77), ("another", KEY.priority)):
        with pytest.raises(InvalidLayout, match="clashes"):
            declare_role(name, priority)
    with pytest.raises(InvalidLayout, match=r"unknown role 'another'; known are .*indexer, key, key_scale"):
        role("another")
    for bad_name in ("", "Key", "k.0", "1st"):
        with pytest.raises(InvalidLayout, match="name"):
            declare_role(bad_name, 78)
    for bad_priority in (-1, True, 1.5, 2**31):
        with pytest.raises(InvalidLayout, match="priority"):
            declare_role("another", bad_priority)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"role": PlaneRole("undeclared", 900)}, "not declared"),
        ({"role": PlaneRole("key", 900)}, "not declared"),
        ({"layer": -1}, "layer"),
        ({"layer": True}, "layer"),
        ({"shape": ()}, "empty shape"),
        ({"shape": (4, 0)}, "dimension"),
        ({"shape": (-4, 2)}, "dimension"),
        ({"shape": (4, 2.0)}, "dimension"),
        ({"dtype": "int4"}, "unknown dtype"),
        ({"split": 2}, "split axis"),
        ({"split": -1}, "split axis"),
    ],
)
def test_refuses_what_is_no_plane(fields: dict[str, Any], message: str) -> None:
    given_fields: dict[str, Any] = {"role": KEY, "layer": 0, "shape": (4, 2), "dtype": DType.BF16, "split": 0}
    with pytest.raises(InvalidLayout, match=message):
        Plane(**{**given_fields, **fields})


def test_a_plane_takes_lists_and_names() -> None:
    loose: Any = {"shape": [4, 2], "dtype": "bf16"}
    assert Plane(KEY, 0, **loose) == Plane(KEY, 0, (4, 2), DType.BF16)


def test_refuses_what_is_no_layout() -> None:
    plane = Plane(KEY, 0, (4, 2), DType.BF16, 0)
    with pytest.raises(InvalidLayout, match="at least one plane"):
        KVLayout(16, ())
    with pytest.raises(InvalidLayout, match=r"key\.0 is there twice"):
        KVLayout(16, (plane, Plane(VALUE, 0, (4, 2), DType.BF16), replace(plane, shape=(8, 8))))
    for bad in (0, -1, True, 2**31):
        with pytest.raises(InvalidLayout, match="block_tokens"):
            KVLayout(bad, (plane,))
    with pytest.raises(InvalidLayout, match=r"no plane value\.0"):
        KVLayout(16, (plane,)).plane("value", 0)
    with pytest.raises(InvalidLayout, match="at least one plane"):
        gqa_layout(num_layers=0, num_kv_heads=1, head_dim=1, block_tokens=1, dtype=DType.BF16)
    with pytest.raises(InvalidLayout, match="one-byte"):
        gqa_fp8_layout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1, dtype=DType.BF16)
    with pytest.raises(InvalidLayout, match="lora_rank must be a multiple of 128"):
        dsa_layout(num_layers=1, block_tokens=1, lora_rank=500)


def test_combine() -> None:
    main = gqa_layout(num_layers=2, num_kv_heads=4, head_dim=8, block_tokens=16, dtype=DType.BF16)
    draft = mla_layout(num_layers=1, block_tokens=16)
    both = combine(draft.with_layer_offset(2), main)
    assert names(both) == ["key.0", "value.0", "key.1", "value.1", "latent.2"]
    assert both.num_layers == 3
    assert combine(main) == main
    # The same layer may have planes of two groups, as long as their roles differ.
    assert names(combine(main, draft))[:3] == ["key.0", "value.0", "latent.0"]
    with pytest.raises(InvalidLayout, match=r"key\.1 is there twice"):
        combine(main, main.with_layer_offset(1))
    with pytest.raises(InvalidLayout, match="block_tokens"):
        combine(main, mla_layout(num_layers=1, block_tokens=32))
    with pytest.raises(InvalidLayout, match="at least one"):
        combine()
    with pytest.raises(InvalidLayout, match="layer"):
        main.with_layer_offset(-1)


@given(st.permutations(range(12)))
def test_any_order_of_planes_is_one_layout(order: list[int]) -> None:
    planes = SAMPLES["gqa-fp8-scales"].planes
    shuffled = KVLayout(64, tuple(planes[index] for index in order))
    assert shuffled == SAMPLES["gqa-fp8-scales"]
    assert shuffled.fingerprint == SAMPLES["gqa-fp8-scales"].fingerprint
