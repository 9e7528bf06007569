"""The ticket: what it may say, that it survives JSON and nothing else does, who may use it; what a prompt is called."""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.core.errors import InvalidInput
from headwater.core.identity import CacheIdentity
from headwater.core.keys import BlockKey, Extra, block_keys
from headwater.disagg.prompt import check_prompt, name_prompt
from headwater.disagg.protocol import (
    FORMAT,
    MAX_BLOCKS,
    MAX_COUNTS,
    MAX_NAME_CHARS,
    MAX_TICKET_BYTES,
    MAX_TOP,
    FirstToken,
    FirstTokenFinish,
    SamplerState,
    Tail,
    Ticket,
    check,
    decode,
)

B = 4
NONCE = bytes(range(32))
SIZES = (1, B - 1, B, B + 1, 3 * B, 25 * B + 2)


def digest(word: str) -> bytes:
    return hashlib.sha256(word.encode()).digest()


def identity(**fields: Any) -> CacheIdentity:
    named = {name: digest(name) for name in ("weights", "config", "layout")}
    return CacheIdentity(**{"model": "test", "block_tokens": B, **named, **fields})


def tokens(number: int, seed: int = 0) -> list[int]:
    return [(31 * i + seed) % 1000 for i in range(number)]


def ticket(num_tokens: int = 2 * B + 3, **fields: Any) -> Ticket:
    prompt = name_prompt(tokens(num_tokens), identity=identity(), nonce=NONCE)
    over = bool(fields.get("finish"))
    made: dict[str, Any] = {
        "request": "request-1",
        "identity": identity().digest,
        "layout": digest("layout"),
        "block_tokens": B,
        "tp_size": 1,
        "root": prompt.root,
        "nonce": NONCE,
        "num_prompt_tokens": num_tokens,
        "keys": () if over else prompt.keys,
        "tail": None if over else prompt.tail,
        "first": FirstToken(token=17),
        "sampler": SamplerState(seed=5, position=num_tokens + 1),
        "expires_at_ms": 2_000_000,
        "pool": "redis",
    }
    return Ticket(**{**made, **fields})


# --- there and back ---------------------------------------------------------------------------------------------------

U32 = st.integers(0, (1 << 32) - 1)
REALS = st.floats(allow_nan=False, allow_infinity=False)
FIRSTS = st.builds(
    FirstToken, token=U32, logprob=st.none() | REALS, top=st.lists(st.tuples(U32, REALS), max_size=5).map(tuple)
)
SAMPLERS = st.builds(
    SamplerState,
    seed=st.integers(-(1 << 63), (1 << 63) - 1),
    position=st.integers(0, (1 << 63) - 1),
    counts=st.dictionaries(U32, st.integers(1, 1 << 40), max_size=5).map(lambda found: tuple(sorted(found.items()))),
    held_text=st.text(max_size=20),
)


@given(
    st.sampled_from(SIZES),
    FIRSTS,
    SAMPLERS,
    st.sampled_from(FirstTokenFinish),
    st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=MAX_NAME_CHARS),
    st.integers(1, (1 << 63) - 1),
    st.integers(1, 8),
)
def test_what_is_said_arrives(
    num_tokens: int,
    first: FirstToken,
    sampler: SamplerState,
    finish: FirstTokenFinish,
    name: str,
    expires: int,
    tp: int,
) -> None:
    one = ticket(
        num_tokens, first=first, sampler=sampler, finish=finish, request=name, expires_at_ms=expires, tp_size=tp
    )
    text = one.encode()
    assert decode(text) == one
    assert decode(text.encode()) == one
    assert hash(decode(text)) == hash(one)
    assert decode(text).encode() == text


@pytest.mark.parametrize("num_tokens", SIZES)
def test_blocks_of_a_ticket(num_tokens: int) -> None:
    one = ticket(num_tokens)
    assert one.num_blocks == -(-num_tokens // B)
    assert len(one.keys) == num_tokens // B
    assert (one.tail is None) == (num_tokens % B == 0)
    assert not one.over
    over = ticket(num_tokens, finish=FirstTokenFinish.STOP)
    assert over.over
    assert over.num_blocks == 0


def test_a_ticket_of_the_largest_prompt_fits() -> None:
    keys = tuple(BlockKey(digest(str(at))) for at in range(MAX_BLOCKS))
    counts = tuple((token, (1 << 63) - 1) for token in range((1 << 32) - MAX_COUNTS, 1 << 32))
    one = ticket(
        MAX_BLOCKS * B,
        keys=keys,
        sampler=SamplerState(seed=-(1 << 63), position=0, counts=counts, held_text="\x00" * 4096),
        first=FirstToken(token=0, logprob=-1.0, top=((1, -1.2345678901234567e-300),) * MAX_TOP),
    )
    text = one.encode()
    assert len(text) <= MAX_TICKET_BYTES
    assert decode(text) == one


# --- what is none -----------------------------------------------------------------------------------------------------


def _with(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        for name in outer:
            document = document[name]
        document[last] = value

    return change


def _without(path: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        for name in outer:
            document = document[name]
        del document[last]

    return change


HEX = digest("x").hex()
FIELDS = [name for name in json.loads(ticket().encode()) if name != "headwater_ticket"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *[(_without(name), "fields are to be|of a ticket") for name in FIELDS],
        *[(_with(name, None), "") for name in FIELDS if name != "tail"],
        *[(_with(name, []), "") for name in FIELDS],
        *[(_with(name, True), "") for name in FIELDS],
        (_with("headwater_ticket", FORMAT + 1), "same version"),
        (_with("headwater_ticket", None), "same version"),
        (_with("more", 1), "fields are to be"),
        (_with("tail.more", 1), "fields are to be"),
        (_with("first.more", 1), "fields are to be"),
        (_without("sampler.seed"), "fields are to be"),
        (_with("request", ""), "1 to 256 characters"),
        (_with("request", "x" * (MAX_NAME_CHARS + 1)), "1 to 256 characters"),
        (_with("request", "a\nb"), "printable"),
        (_with("identity", HEX[:-2]), "no digest"),
        (_with("identity", HEX[:-1] + "g"), "no digest"),
        (_with("layout", HEX.encode().hex()), "no digest"),
        (_with("block_tokens", 0), "block_tokens"),
        (_with("block_tokens", B + 1), "last 1 tokens"),
        (_with("block_tokens", float(B)), "block_tokens"),
        (_with("num_prompt_tokens", 2 * B), "tokens are left|tail"),
        (_with("num_prompt_tokens", 3 * B), "tokens fill"),
        (_with("num_prompt_tokens", -1), "num_prompt_tokens"),
        (_with("keys", "AAAA"), "bytes"),
        (_with("keys", "not base64!"), ""),
        (lambda document: document.update(keys="\n" + document["keys"]), ""),
        (_with("keys", ""), "tokens fill"),
        (_with("tail", None), "tokens are left for a tail"),
        (_with("tail.valid_tokens", 2), "last 3 tokens"),
        (_with("tail.valid_tokens", 0), "valid_tokens"),
        (_with("tail.key", ticket().root.hex()), "key of its own"),
        (_with("root", ticket().keys[0].hex()), "key of its own"),
        (_with("first.token", 1 << 32), "a token"),
        (_with("first.logprob", "0"), "finite"),
        (_with("first.top", [[1, 2, 3]]), "pairs"),
        (_with("first.top", [[1, 0.0]] * (MAX_TOP + 1)), "more than"),
        (_with("sampler.seed", 1 << 63), "a seed"),
        (_with("sampler.position", -1), "a position"),
        (_with("sampler.counts", [[2, 1], [1, 1]]), "a token"),
        (_with("sampler.counts", [[1, 1], [1, 1]]), "a token"),
        (_with("sampler.counts", [[1, 0]]), "a count"),
        (_with("sampler.counts", {"1": 1}), "pairs"),
        (_with("sampler.held_text", "x" * 4097), "0 to 4096"),
        (_with("expires_at_ms", 0), "expires_at_ms"),
        (_with("expires_at_ms", 1.5), "expires_at_ms"),
        (_with("tp_size", 0), "tp_size"),
        (_with("finish", "tired"), "tired"),
        (_with("finish", "stop"), "tokens fill"),
    ],
)
def test_what_contradicts_itself_is_no_ticket(change: Callable[[dict[str, Any]], None], words: str) -> None:
    document = json.loads(ticket().encode())
    change(document)
    with pytest.raises(InvalidInput, match=f"not a ticket.*({words})"):
        decode(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "1",
        b"\xff\xfe",
        "[" * 100_000,
        '{"headwater_ticket":1}',
        ticket().encode()[:-1],
        ticket().encode() + "x",
        ticket().encode().replace('"position":12', '"position":NaN'),
        ticket(first=FirstToken(token=1, logprob=1.0)).encode().replace("1.0", "1e999"),
        ticket(first=FirstToken(token=1, logprob=1.0)).encode().replace("1.0", "1" + "0" * 400),
        ticket().encode().replace('"tp_size":1', '"tp_size":1,"tp_size":2'),
        ticket(first=FirstToken(token=1, logprob=1.0)).encode().replace("1.0", "NaN"),
        ticket().encode() + " " * MAX_TICKET_BYTES,
    ],
)
def test_what_is_no_ticket_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidInput, match="not a ticket"):
        decode(text)


@given(st.data())
def test_a_ticket_with_a_byte_changed_is_another_or_none(data: st.DataObject) -> None:
    text = ticket().encode()
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(codec="utf-8").filter(lambda one: one != text[at]))
    try:
        found = decode(text[:at] + other + text[at + 1 :])
    except InvalidInput:
        return
    assert found != ticket() or text[at].isalpha()  # hexadecimal digits have two cases


def test_a_ticket_cannot_be_made_wrong_either() -> None:
    one = ticket()
    assert one.tail is not None
    for fields in (
        {"tail": None},
        {"tail": Tail(one.tail.key, B)},
        {"keys": one.keys[:1]},
        {"keys": (one.keys[0], one.keys[0])},
        {"keys": (one.keys[0], b"short")},
        {"nonce": b"short"},
        {"finish": FirstTokenFinish.STOP},
        {"finish": "stop"},
        {"keys": tuple(BlockKey(digest(str(at))) for at in range(MAX_BLOCKS + 1))},
    ):
        with pytest.raises(InvalidInput):
            replace(one, **fields)


# --- who may use it ---------------------------------------------------------------------------------------------------


def test_a_node_of_the_same_sort_may_use_it() -> None:
    ours: dict[str, Any] = {"identity": identity().digest, "fingerprint": digest("layout"), "block_tokens": B}
    assert check(ticket(), **ours, now_s=1999.9) is None
    assert check(ticket(), **ours, now_s=1999.9, pool="redis") is None


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"block_tokens": 8}, "blocks have 4 tokens and this node's 8: start prefill and decode with the same block"),
        ({"fingerprint": digest("other")}, "KV layout is .* start prefill and decode with the same model and the same"),
        ({"identity": digest("other")}, "cache identity is .* same weights, configuration, adapter and quantisation"),
        ({"pool": "mooncake"}, "in a redis pool and this node's is mooncake: give both ends the same pool"),
        ({"now_s": 2000.0}, "expired 0.0 s ago: prefill again"),
        ({"now_s": 2002.5}, "expired 2.5 s ago"),
        ({"block_tokens": 8, "fingerprint": digest("o"), "identity": digest("o")}, "blocks have 4 tokens"),
    ],
)
def test_a_node_that_differs_hears_what_to_change(other: dict[str, Any], words: str) -> None:
    ours: dict[str, Any] = {
        "identity": identity().digest,
        "fingerprint": digest("layout"),
        "block_tokens": B,
        "now_s": 1000.0,
    }
    said = check(ticket(), **{**ours, **other})
    assert said is not None
    assert re.search(words, said), said


# --- what a prompt is called ------------------------------------------------------------------------------------------


def test_names_do_not_change() -> None:
    """Golden values, made by SHA-256 alone: both ends make them, maybe of different versions."""
    prompt = name_prompt(range(2 * B + 3), identity=identity(), nonce=NONCE)
    assert [key.hex()[:16] for key in prompt.keys] == GOLDEN_KEYS
    assert prompt.tail is not None
    assert (prompt.tail.key.hex()[:16], prompt.tail.valid_tokens) == GOLDEN_TAIL


GOLDEN_KEYS = ["79e49da423db7e20", "148ece64a3ee3050"]
GOLDEN_TAIL = ("c523b8b865712f97", 3)


@given(st.integers(1, 40), st.binary(min_size=32, max_size=32))
def test_full_blocks_are_everybodys_and_the_tail_is_not(num_tokens: int, nonce: bytes) -> None:
    ids = tokens(num_tokens)
    prompt = name_prompt(ids, identity=identity(), nonce=nonce)
    assert list(prompt.keys) == block_keys(ids, parent=identity().root, block_tokens=B)
    assert prompt.num_blocks == -(-num_tokens // B)
    same, other = (name_prompt(ids, identity=identity(), nonce=one) for one in (nonce, digest("other")))
    assert same == prompt
    assert other.keys == prompt.keys
    if num_tokens % B:
        assert prompt.tail is not None
        assert other.tail is not None
        assert prompt.tail.valid_tokens == num_tokens % B
        shared = block_keys(ids, parent=identity().root, block_tokens=B, tail=True)
        assert len({prompt.tail.key, other.tail.key, *shared}) == len(shared) + 2
    else:
        assert prompt.tail is None


def test_an_image_in_the_tail_has_a_say() -> None:
    image = Extra("image", digest("cat"), 2 * B, 2)
    plain, pictured = (
        name_prompt(tokens(2 * B + 3), identity=identity(), nonce=NONCE, extras=extras) for extras in ((), (image,))
    )
    assert plain.keys == pictured.keys
    assert plain.tail != pictured.tail


def test_a_ticket_is_of_its_prompt_only() -> None:
    ids = tokens(2 * B + 3)
    assert check_prompt(ticket(), ids, identity=identity()) is None
    image = Extra("image", digest("cat"), 2 * B, 2)
    for other, options, words in (
        (ids[:-1], {}, "11 prompt tokens and the request has 10"),
        ([9, *ids[1:]], {}, "from block 0 on"),
        ([*ids[:-1], 9], {}, "from block 2 on"),
        (ids, {"salt": b"tenant"}, "another tenant"),
        (ids, {"extras": [image]}, "from block 2 on"),
    ):
        said = check_prompt(ticket(), other, identity=identity(), **options)
        assert said is not None, words
        assert words in said
    over = ticket(finish=FirstTokenFinish.STOP)
    assert check_prompt(over, ids, identity=identity()) is None
    assert check_prompt(over, ids[1:], identity=identity()) is not None
    with pytest.raises(InvalidInput, match="at least one token"):
        name_prompt([], identity=identity(), nonce=NONCE)
