"""The attention backends: the bytes they leave in planes, and what they compute from them, against plain numpy.

The reference is written here from the formats' definitions: a table of the 256 e4m3 values, nearest by search, scales
by frexp, attention in float64 over one head and one query at a time.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from headwater.core.errors import InvalidInput, InvalidLayout
from headwater.engine.attention import quantise
from headwater.engine.attention.base import causal_attention, masked_attention, read_rows, write_rows
from headwater.engine.attention.dsa import DsaAttention, Index, choose, hadamard
from headwater.engine.attention.gqa import GqaAttention
from headwater.engine.attention.mla import MlaAttention, Queries, absorbed_attention, expanded_attention
from headwater.engine.models.base import Span
from headwater.engine.step import FEW_TOKENS, Step, StepLimits, plan
from headwater.layout.spec import DType
from headwater.transfer.device.arena import DeviceCache, create_kv_cache

Floats = npt.NDArray[np.float64]
CPU = torch.device("cpu")
BLOCK = 4


def _e4m3() -> Floats:
    """Every byte's value, by definition: 1 sign, 4 exponent bits with bias 7, 3 mantissa bits; 0x7f is no number."""
    values = np.empty(256)
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        values[byte] = np.nan if byte & 0x7F == 0x7F else math.copysign(size, -1 if byte & 0x80 else 1)
    return values


E4M3 = _e4m3()
POSITIVE = E4M3[:127]


def to_e4m3(values: Floats) -> npt.NDArray[np.uint8]:
    """The nearest byte of each value; halfway, the even one."""
    out = np.empty(values.shape, dtype=np.uint8)
    for place, value in np.ndenumerate(values):
        gaps = np.abs(POSITIVE - abs(value))
        best = np.flatnonzero(gaps == gaps.min())
        byte = int(min(best, key=lambda one: one & 1))
        out[place] = byte | (0x80 if math.copysign(1, value) < 0 else 0)
    return out


def bf16(value: Any) -> Floats:
    return torch.as_tensor(value, dtype=torch.float32).to(torch.bfloat16).double().numpy()


def power_of_two(value: float) -> float:
    mantissa, exponent = math.frexp(value)
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def attention(q: Floats, k: Floats, v: Floats, scale: float, allowed: Sequence[int] | None = None) -> Floats:
    """One query [D] over keys [S, D] and values [S, E]."""
    if allowed is not None:
        k, v = k[list(allowed)], v[list(allowed)]
    scores = k @ q * scale
    weights = np.exp(scores - scores.max())
    return np.asarray(weights / weights.sum() @ v)


def step_of(spans: Sequence[Span], heads: int, num_blocks: int = 64) -> Step:
    return plan(spans, limits=StepLimits(1000, 4096, num_blocks, BLOCK), heads=heads, device=CPU)


def span(length: int, start: int, slots: Sequence[int]) -> Span:
    return Span([0] * length, start, slots)


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- steps ------------------------------------------------------------------------------------------------------------


def test_a_step_puts_spans_of_a_kind_together_and_keeps_the_spans_order_of_logits() -> None:
    spans = [
        Span(list(range(40)), 0, range(10), num_logits=2),
        Span([7], 9, [20, 21, 22]),
        Span([1, 2, 3], 4, [30, 31], num_logits=3),
        Span([8], 12, [40, 41, 42, 43], num_logits=0),
        Span([9], 14, [44, 45, 46, 47]),
    ]
    step = step_of(spans, heads=1)
    assert [(group.num_spans, group.num_new, group.num_positions) for group in step.groups] == [
        (3, 1, 15),  # 10, 13 and 15 positions: of about the same length
        (1, 3, 7),
        (1, 40, 40),
    ]
    assert [group.few for group in step.groups] == [True, True, False]
    assert step.tokens.tolist() == [7, 8, 9, 1, 2, 3, *range(40)]
    assert step.positions.tolist()[:6] == [9, 12, 14, 4, 5, 6]
    assert step.tokens[step.logits].tolist() == [38, 39, 7, 1, 2, 3, 9]
    assert step.rows[:6].tolist() == [22 * 4 + 1, 43 * 4, 47 * 4 + 2, 31 * 4, 31 * 4 + 1, 31 * 4 + 2]


def test_padding_repeats_a_spans_own_last_position() -> None:
    group = step_of([Span([1], 9, [5, 6, 7]), Span([1], 14, [1, 2, 3, 4])], heads=2).groups[0]
    assert group.rows.shape == (2, 2, 15)
    short = group.rows[0, 0].tolist()
    assert short == [(5 + i // 4) * 2 * BLOCK + i % 4 for i in range(10)] + [7 * 2 * BLOCK + 1] * 5
    assert (group.rows[:, 1] - group.rows[:, 0] == BLOCK).all()
    assert group.visible.sum(-1).tolist() == [[10], [15]]


def test_contexts_of_very_different_length_are_not_padded_to_each_other() -> None:
    step = step_of([Span([1], 9, range(3)), Span([1], 200, range(51)), Span([1], 210, range(53))], heads=1)
    assert [(group.num_spans, group.num_positions) for group in step.groups] == [(1, 10), (2, 211)]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (Span([], 0, [1]), "at least one token"),
        (Span([1], -1, [1]), "positions -1"),
        (Span([1] * 10, 4090, range(50)), "do not fit a model of 4096"),
        (Span([1, 2], 0, [1], num_logits=3), "no 3 logits"),
        (Span([1000], 0, [1]), "token 1000 does not exist"),
        (Span([-1], 0, [1]), "token -1 does not exist"),
        (Span([1], 0, [64]), "slot 64 does not exist; there are 64"),
        (Span([1], 4, [1]), "1 slots of 4 tokens do not cover 5 positions"),
    ],
)
def test_a_span_that_cannot_be_computed_is_refused(bad: Span, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        step_of([Span([1], 0, [0]), bad], heads=1)


@pytest.mark.parametrize("width", [1, 3, 8, 132, 656])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_rows_go_in_and_out_of_a_plane_by_byte(width: int, dtype: torch.dtype) -> None:
    plane = torch.zeros(5, 2, BLOCK, width, dtype=dtype)
    values = (rand(3, width) * 50).to(dtype)
    rows = torch.tensor([39, 0, 17])
    write_rows(plane, rows, values)
    assert torch.equal(plane.view(40, width)[rows], values)
    assert torch.equal(read_rows(plane, rows[None], width)[0], values)
    plane.view(40, width)[rows] = 0
    assert not plane.any()


# --- attention itself -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("new", "total"), [(20, 20), (20, 53), (1, 30), (17, 18)])
@pytest.mark.parametrize("shared", [1, 3])
@pytest.mark.parametrize("largest_mask", [1 << 22, 200])
def test_causal_attention_with_and_without_a_context(
    new: int, total: int, shared: int, largest_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwater.engine.attention.base._MASK_ELEMENTS", largest_mask)  # queries in blocks
    q, k, v = rand(new, 2 * shared, 8), rand(2, total, 8, seed=1), rand(2, total, 8, seed=2)
    out = causal_attention(q, k, v, scale=0.3)
    for token in range(new):
        for head in range(2 * shared):
            keys, values = (x[head // shared].double().numpy() for x in (k, v))
            wanted = attention(q[token, head].double().numpy(), keys, values, 0.3, range(total - new + token + 1))
            np.testing.assert_allclose(out[token, head].numpy(), wanted, atol=2e-6)


def test_masked_attention_of_several_spans() -> None:
    q, k, v = rand(2, 3, 4, 8), rand(2, 2, 11, 8, seed=1), rand(2, 2, 11, 8, seed=2)
    totals = [11, 7]
    visible = torch.zeros(2, 3, 11, dtype=torch.bool)
    for one, total in enumerate(totals):
        for new in range(3):
            visible[one, new, : total - 2 + new] = True
    out = masked_attention(q, k, v, visible=visible, scale=0.5)
    for one, total in enumerate(totals):
        for new in range(3):
            for head in range(4):
                keys, values = (x[one, head // 2].double().numpy() for x in (k, v))
                wanted = attention(q[one, new, head].double().numpy(), keys, values, 0.5, range(total - 2 + new))
                np.testing.assert_allclose(out[one, new, head].numpy(), wanted, atol=2e-6)


# --- GQA --------------------------------------------------------------------------------------------------------------


def gqa(kv_dtype: DType, dtype: torch.dtype = torch.float32) -> GqaAttention:
    return GqaAttention(
        num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, block_tokens=BLOCK, kv_dtype=kv_dtype, dtype=dtype
    )


def run_gqa(
    backend: GqaAttention, planes: DeviceCache, x: tuple[torch.Tensor, ...], chunks: Sequence[int], slots: Sequence[int]
) -> torch.Tensor:
    out, start = [], 0
    for size in chunks:
        q, k, v = (part[start : start + size] for part in x)
        step = step_of([span(size, start, slots)], heads=backend.heads)
        out.append(backend.attend(planes, 1, step, q=q, k=k, v=v))
        start += size
    return torch.cat(out)


SLOTS = [9, 2, 30, 4, 61, 0, 17, 5, 33, 12, 50]


@pytest.mark.parametrize("chunks", [(41,), (20, 21), (18, 1, 1, 3, 18), (1,) * 41])
@pytest.mark.parametrize("kv_dtype", [DType.FP32, DType.BF16, DType.FP16])
def test_gqa_writes_plain_planes_and_attends_to_them(kv_dtype: DType, chunks: tuple[int, ...]) -> None:
    backend = gqa(kv_dtype)
    planes = create_kv_cache(backend.layout, 64)
    x = rand(41, 6, 16), rand(41, 2, 16, seed=1), rand(41, 2, 16, seed=2)
    out = run_gqa(backend, planes, x, chunks, SLOTS)
    stored = {}
    for role, values in zip(("key", "value"), x[1:], strict=True):
        plane = planes.tensors[role, 1]
        rounded = values.to(plane.dtype)
        for position in range(41):
            assert torch.equal(plane[SLOTS[position // BLOCK], :, position % BLOCK], rounded[position])
        stored[role] = rounded.double().numpy()
        assert not planes.tensors[role, 0].any(), "another layer's plane"
    for token in range(41):
        for head in range(6):
            keys, kept = (stored[role][:, head // 3] for role in ("key", "value"))
            wanted = attention(x[0][token, head].double().numpy(), keys, kept, 0.25, range(token + 1))
            np.testing.assert_allclose(out[token, head * 16 : head * 16 + 16].numpy(), wanted, atol=3e-6)


@pytest.mark.parametrize("chunks", [(21,), (17, 1, 3), (1,) * 21])
def test_gqa_fp8_is_what_the_layout_says(chunks: tuple[int, ...]) -> None:
    backend = gqa(DType.FP8_E4M3)
    planes = create_kv_cache(backend.layout, 64)
    x = rand(21, 6, 16), rand(21, 2, 16, seed=1) * 30, rand(21, 2, 16, seed=2) / 1000
    x[1][3, 0] = 0  # a head of zeros
    out = run_gqa(backend, planes, x, chunks, SLOTS)
    kept = {}
    for role, values in zip(("key", "value"), x[1:], strict=True):
        plane, scales = planes.tensors[role, 1], planes.tensors[f"{role}_scale", 1]
        assert (plane.dtype, plane.shape) == (torch.float8_e4m3fn, (64, 2, BLOCK, 16))
        assert (scales.dtype, scales.shape) == (torch.bfloat16, (64, 2, BLOCK))
        kept[role] = np.zeros((21, 2, 16))
        for position in range(21):
            slot, offset = SLOTS[position // BLOCK], position % BLOCK
            for head in range(2):
                row = values[position, head].double().numpy()
                scale = float(bf16(np.float32(max(np.abs(row).max(), 1e-12) / 448)))
                assert float(scales[slot, head, offset]) == scale
                wanted = to_e4m3(np.clip((row / scale).astype(np.float32).astype(np.float64), -448, 448))
                found = plane[slot, head, offset].view(torch.uint8).numpy()
                np.testing.assert_array_equal(found, wanted)
                kept[role][position, head] = E4M3[wanted] * scale
        # Three bits of mantissa: within a sixteenth, or half of the smallest step.
        np.testing.assert_allclose(kept[role], values.numpy(), rtol=1 / 15, atol=1e-5 * float(values.abs().max()))
    for token in range(21):
        for head in range(6):
            keys, values64 = (kept[role][:, head // 3] for role in ("key", "value"))
            wanted_out = attention(x[0][token, head].double().numpy(), keys, values64, 0.25, range(token + 1))
            np.testing.assert_allclose(out[token, head * 16 : head * 16 + 16].numpy(), wanted_out, atol=1e-6, rtol=1e-4)


# --- MLA --------------------------------------------------------------------------------------------------------------


def latent_inputs(new: int, heads: int = 3, nope: int = 8, rope: int = 4, value: int = 6, lora: int = 16) -> Queries:
    return Queries(rand(new, heads, nope), rand(new, heads, rope, seed=1), rand(heads, nope + value, lora, seed=2), 0.4)


@pytest.mark.parametrize("value", [4, 12, 20])  # narrower and wider than keys
@pytest.mark.parametrize(("new", "total"), [(5, 30), (5, 5), (1, 12)])
def test_the_absorbed_and_the_expanded_form_agree(new: int, total: int, value: int) -> None:
    q = latent_inputs(new, value=value)
    rows = rand(total, 20, seed=3)
    visible = torch.ones(new, total, dtype=torch.bool).tril(total - new)[None]
    expanded, absorbed = expanded_attention(q, rows), absorbed_attention(q, rows[None], visible)
    assert expanded.shape == (new, 3, value)
    torch.testing.assert_close(absorbed, expanded, atol=3e-6, rtol=1e-5)
    for token in range(new):  # and both are what attention means
        for head in range(3):
            both = q.expand[head].double().numpy() @ rows[:, :16].double().numpy().T  # [nope + value, total]
            keys = np.concatenate((both[:8].T, rows[:, 16:].double().numpy()), axis=1)
            query = torch.cat((q.nope, q.rope), -1)[token, head].double().numpy()
            wanted = attention(query, keys, both[8:].T, 0.4, range(total - new + token + 1))
            np.testing.assert_allclose(expanded[token, head].numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("kv_dtype", [DType.FP32, DType.BF16])
def test_mla_caches_the_latent_and_the_rotary_key(kv_dtype: DType) -> None:
    backend = MlaAttention(
        num_layers=1, lora_rank=16, rope_dim=4, block_tokens=BLOCK, kv_dtype=kv_dtype, dtype=torch.float32
    )
    q, latent, rope = latent_inputs(40), rand(40, 16, seed=5), rand(40, 4, seed=6)
    results = []
    for chunks in ((40,), (20, 20), (1,) * 40, (17, 3, 20)):
        planes, start, out = create_kv_cache(backend.layout, 64), 0, []
        for size in chunks:
            part = slice(start, start + size)
            step = step_of([span(size, start, SLOTS)], heads=1)
            out.append(backend.attend(planes, 0, step, q=q.part(part), latent=latent[part], rope=rope[part]))
            start += size
        results.append(torch.cat(out))
        plane = planes.tensors["latent", 0]
        for position in range(40):
            wanted = torch.cat((latent[position], rope[position])).to(plane.dtype)
            assert torch.equal(plane[SLOTS[position // BLOCK], position % BLOCK], wanted)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], atol=5e-6, rtol=1e-5)


# --- DSA --------------------------------------------------------------------------------------------------------------


def dsa(kv_dtype: DType, top_k: int, **options: int) -> DsaAttention:
    sizes = {"lora_rank": 128, "rope_dim": 4, "index_dim": 128, **options}
    return DsaAttention(num_layers=1, top_k=top_k, block_tokens=BLOCK, kv_dtype=kv_dtype, dtype=torch.float32, **sizes)


def test_packed_rows_have_exactly_the_bytes_of_the_layout() -> None:
    backend = dsa(DType.FP8_E4M3, 8, lora_rank=512, rope_dim=64)
    assert backend.layout.plane("key", 0).shape == (BLOCK, 656)
    assert backend.layout.plane("indexer", 0).shape == (BLOCK, 132)
    latent, rope, keys = rand(5, 512) * 7, rand(5, 64, seed=1), rand(5, 128, seed=2)
    latent[1, 128:256] = 0
    latent[2, :128] *= 2.0**-140  # below the normal numbers
    rows, index = quantise.pack_key_rows(latent, rope).numpy(), quantise.pack_index_rows(keys).numpy()
    assert (rows.shape, index.shape) == ((5, 656), (5, 132))
    for token in range(5):
        scales = rows[token, 512:528].view(np.float32)
        for group in range(4):
            values = latent[token, group * 128 : group * 128 + 128].double().numpy()
            amax = np.abs(values).max()
            scale = power_of_two(float(np.float32(amax) / np.float32(448))) if amax > 1e-30 else 2.0**-126
            assert scales[group] == scale
            found = rows[token, group * 128 : group * 128 + 128]
            np.testing.assert_array_equal(found, to_e4m3(values / scale))
        np.testing.assert_array_equal(rows[token, 528:].view(np.uint16), rope[token].bfloat16().view(torch.uint16))
        scale = power_of_two(float(keys[token].abs().max() / 448))
        assert index[token, 128:].view(np.float32) == [scale]
        np.testing.assert_array_equal(index[token, :128], to_e4m3(keys[token].double().numpy() / scale))
    back = quantise.unpack_key_rows(torch.from_numpy(rows), 512, torch.float32)
    again = quantise.unpack_key_rows(quantise.pack_key_rows(back[:, :512], back[:, 512:]), 512, torch.float32)
    assert torch.equal(again, back), "what was kept once is kept"
    torch.testing.assert_close(back[:, 512:], rope.bfloat16().float(), atol=0, rtol=0)
    torch.testing.assert_close(back[0, :512], latent[0], rtol=1 / 15, atol=0.01)


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    rows = torch.zeros(3, 128)
    rows[:, 0] = torch.tensor([448.0, 448.0 * 2 + 0.001, 448.0 / 1024])
    packed = quantise.pack_index_rows(rows)
    assert packed[:, 128:].contiguous().view(torch.float32)[:, 0].tolist() == [1.0, 4.0, 2.0**-10]
    assert packed[:, 0].tolist() == [0x7E, to_e4m3(np.array([448.0 * 2 + 0.001]) / 4)[0], 0x7E]


def test_of_equal_scores_the_later_positions_are_chosen() -> None:
    scores = torch.tensor([[0.0, -0.0, 3.0, 0.0, -1.0, -0.0, float("-inf"), -2.0]])
    assert choose(scores, 3).tolist() == [[2, 3, 5]]
    assert choose(scores, 6).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert choose(torch.randn(3, 5), 5).tolist() == [[0, 1, 2, 3, 4]] * 3


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    matrix = hadamard(128, torch.float64, CPU)
    torch.testing.assert_close(matrix @ matrix, torch.eye(128, dtype=torch.float64))
    with pytest.raises(InvalidLayout, match="power of two"):
        dsa(DType.FP8_E4M3, 8, index_dim=384)


@pytest.mark.parametrize("chunks", [(45,), (20, 25), (1,) * 45, (17, 3, 1, 24)])
@pytest.mark.parametrize("kv_dtype", [DType.FP32, DType.BF16, DType.FP8_E4M3])
@pytest.mark.parametrize("top_k", [7, 64])
def test_dsa_attends_to_the_best_positions_only(kv_dtype: DType, chunks: tuple[int, ...], top_k: int) -> None:
    backend = dsa(kv_dtype, top_k)
    q = latent_inputs(45, lora=128)
    q = Queries(q.nope, q.rope, q.expand, 0.05)
    latent, rope = rand(45, 128, seed=5), rand(45, 4, seed=6)
    index = Index(rand(45, 5, 128, seed=7), rand(45, 128, seed=8), rand(45, 5, seed=9))
    planes, start, out = create_kv_cache(backend.layout, 64), 0, []
    for size in chunks:
        part = slice(start, start + size)
        new = Index(index.queries[part], index.keys[part], index.weights[part])
        step = step_of([span(size, start, [*SLOTS, 62])], heads=1)
        out.append(backend.attend(planes, 0, step, q=q.part(part), latent=latent[part], rope=rope[part], index=new))
        start += size
    found = torch.cat(out).view(45, 3, 6)
    # What the planes hold, read by hand.
    slots = [*SLOTS, 62]
    table = np.array([slots[position // BLOCK] * BLOCK + position % BLOCK for position in range(45)])
    key, indexer = (planes.tensors[role, 0].flatten(0, 1)[table] for role in ("key", "indexer"))
    turn = np.eye(128)
    if kv_dtype is DType.FP8_E4M3:
        latents = E4M3[key[:, :128].numpy()] * key[:, 128:132].contiguous().view(torch.float32).double().numpy()
        ropes = key[:, 132:].contiguous().view(torch.bfloat16).double().numpy()
        index_keys = E4M3[indexer[:, :128].numpy()] * indexer[:, 128:].contiguous().view(torch.float32).double().numpy()
        turn = hadamard(128, torch.float64, CPU).numpy()
        np.testing.assert_allclose(index_keys, index.keys.double().numpy() @ turn, rtol=1 / 15, atol=0.01)
    else:
        latents, ropes = key[:, :128].double().numpy(), key[:, 128:].double().numpy()
        index_keys = indexer.double().numpy()
        torch.testing.assert_close(indexer, index.keys.to(indexer.dtype), atol=0, rtol=0)
    np.testing.assert_allclose(latents, latent.numpy(), rtol=1 / 15, atol=0.01)
    for token in range(45):
        products = np.maximum(index.queries[token].double().numpy() @ turn @ index_keys.T, 0)  # [heads, positions]
        scores = (index.weights[token].double().numpy() @ products)[: token + 1]
        best = np.sort(np.argsort(-scores, kind="stable")[:top_k])
        for head in range(3):
            both = q.expand[head].double().numpy() @ latents.T
            keys = np.concatenate((both[:8].T, ropes), axis=1)
            query = torch.cat((q.nope, q.rope), -1)[token, head].double().numpy()
            wanted = attention(query, keys, both[8:].T, 0.05, best.tolist())
            np.testing.assert_allclose(found[token, head].numpy(), wanted, atol=2e-5)


def test_queries_in_blocks_give_what_they_give_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = dsa(DType.FP8_E4M3, 7)
    q, latent, rope = latent_inputs(45, lora=128), rand(45, 128, seed=5), rand(45, 4, seed=6)
    index = Index(rand(45, 5, 128, seed=7), rand(45, 128, seed=8), rand(45, 5, seed=9))
    step = step_of([span(45, 0, [*SLOTS, 62])], heads=1)
    results = []
    for elements in (1 << 26, 5000, 1):
        monkeypatch.setattr("headwater.engine.attention.dsa._ELEMENTS", elements)
        planes = create_kv_cache(backend.layout, 64)
        results.append(backend.attend(planes, 0, step, q=q, latent=latent, rope=rope, index=index))
    torch.testing.assert_close(results[1], results[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(results[2], results[0], atol=1e-5, rtol=1e-5)


def test_what_few_means_is_what_the_tests_above_assume() -> None:
    assert 3 <= FEW_TOKENS < 17
