"""The connector's parts that need no vLLM: options, tensors, identity, names of blocks, what others hear."""

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headwater.core.errors import InvalidConfig, InvalidLayout, NotInstalled
from headwater.core.events import Removed, Stored, TierLost
from headwater.core.identity import CacheIdentity, root_of
from headwater.core.keys import BlockKey, block_keys
from headwater.integrations.vllm import engine_facts
from headwater.integrations.vllm.counted import Counted, merged
from headwater.integrations.vllm.identity import as_fields, engine_identity, plain, rank_identity
from headwater.integrations.vllm.kv_events import Teller
from headwater.integrations.vllm.metadata import Orders, RankFacts
from headwater.integrations.vllm.naming import Namer
from headwater.integrations.vllm.pacer import Pacer
from headwater.integrations.vllm.registered import RegisteredCache
from headwater.integrations.vllm.settings import LoadMode, machine_disk_bytes, machine_host_bytes, read_config
from headwater.integrations.vllm.weights import adapter_digest, weights_digest
from headwater.metrics import Metrics, labels_of
from headwater.testing.clock import FakeClock


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from headwater.integrations import vllm

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.delitem(sys.modules, "headwater.integrations.vllm.connector", raising=False)
    with pytest.raises(NotInstalled, match="install headwater into vLLM's environment"):
        _ = vllm.HeadwaterConnector


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_are_those_of_our_own_server() -> None:
    found = read_config({"host_directory": "/x/host", "disk_directory": None, "load": "sync", "host_bytes": 1 << 30})
    assert (found.host_directory, found.disk_directory, found.load) == (Path("/x/host"), None, LoadMode.SYNC)
    assert read_config({}).host_directory is not None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"hostdir": "/x"}, "no option 'hostdir'"),
        ({"host_directory": 3}, "host_directory must be a path"),
        ({"host_directory": "/x", "disk_directory": "/x"}, "directories of their own"),
        ({"host_bytes": 5}, "host_bytes must be"),
        ({"load": "lazy"}, "load is one of async, sync"),
        ({"load_when": "never"}, "load_when is one of pays, always"),
        ({"on_failed_load": "cry"}, "on_failed_load is one of"),
        ({"load_timeout_s": 0}, "load_timeout_s must be"),
        ({"free_timeout_s": -1}, "seconds"),
        ({"pool": "ftp://x"}, "a pool is at"),
        ({"residency": "ftp://x"}, "a residency index is at"),
        ({"node": "a"}, "residency index"),
        ({"min_load_blocks": 0}, "min_load_blocks"),
        ({"switch_interval_s": 0}, "seconds"),
        ({"layout": 3}, "layout must be text"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidConfig, match=word):
        read_config(options)


def test_sizes_fit_the_machine(tmp_path: Path) -> None:
    for size in (machine_host_bytes(tmp_path / "a/b"), machine_disk_bytes(tmp_path / "a/b")):
        assert 8 << 20 <= size < 1 << 50
    assert machine_host_bytes(tmp_path) == machine_host_bytes(tmp_path)


# --- tensors ----------------------------------------------------------------------------------------------------------


def _same(cache: RegisteredCache, block: int, value: int) -> None:
    for row in cache.rows:
        row[block] = value


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(6, 2, 4, 8, dtype=torch.bfloat16),  # blocks, heads, tokens, values
        torch.zeros(2, 6, 4, 2, 8),  # keys and values apart
        torch.zeros(6, 4, 2, 8).permute(0, 2, 1, 3),  # heads and tokens swapped, still a run of bytes
        torch.zeros(12, 2, 4, 8),  # two of the kernel's blocks are one of ours
    ],
)
def test_a_block_is_its_bytes_and_nobody_elses(tensor: torch.Tensor) -> None:
    cache = RegisteredCache({"layer": tensor}, num_blocks=6, block_tokens=4)
    assert sum(cache.layout.plane_bytes) * 6 == tensor.numel() * tensor.element_size()
    assert all(row.stride() == (row.shape[1], 1) for row in cache.rows), "the GPU's kernels step from block to block so"
    _same(cache, 3, 0xFF)
    axis = 1 if tensor.shape[0] == 2 else 0
    blocks = tensor.transpose(0, axis).reshape(6, -1)
    touched = blocks.contiguous().view(torch.uint8).reshape(6, -1)
    assert touched[3].eq(0xFF).all()
    assert not touched[[0, 1, 2, 4, 5]].any()


def test_layers_side_by_side_are_one_plane() -> None:
    everything = torch.zeros(6, 3, 16, dtype=torch.uint8)  # block, layer, bytes
    layers = {f"layer.{at}": everything[:, at] for at in range(3)}
    cache = RegisteredCache(layers, num_blocks=6, block_tokens=4)
    assert cache.layout.plane_bytes == (48,)
    _same(cache, 5, 1)
    assert everything[5].all()
    assert not everything[:5].any()


@pytest.mark.fault("C7")
def test_padded_pages_of_layers_behind_each_other_are_planes() -> None:
    everything = torch.zeros(3, 6, 16, dtype=torch.uint8)  # layer, block, bytes, of which four are padding
    layers = {f"layer.{at}": everything[at, :, :12] for at in range(3)}
    cache = RegisteredCache(layers, num_blocks=6, block_tokens=4)
    assert cache.layout.plane_bytes == (16, 16, 16)
    _same(cache, 5, 1)
    assert everything[:, 5].all()
    assert not everything[:, :5].any()


@pytest.mark.fault("C7")
def test_padding_that_is_not_there_is_said() -> None:
    flat = torch.zeros(5 * 16 + 12, dtype=torch.uint8)
    with pytest.raises(InvalidLayout, match=r"12 bytes, 16 from one to the next"):
        RegisteredCache({"a": flat.as_strided((6, 12), (16, 1))}, num_blocks=6, block_tokens=4)
    flat = torch.zeros(200, dtype=torch.uint8)
    layers = {"a": flat.as_strided((6, 12), (16, 1)), "b": flat[32:].as_strided((6, 12), (16, 1))}
    with pytest.raises(InvalidLayout, match="overlap"):
        RegisteredCache(layers, num_blocks=6, block_tokens=4)


@pytest.mark.fault("C7")
def test_the_stride_of_a_dimension_of_one_means_nothing() -> None:
    flat = torch.zeros(6 * 16, dtype=torch.uint8)
    facts = [
        RegisteredCache({"a": flat.as_strided((6, 1, 16), (16, odd, 1))}, num_blocks=6, block_tokens=4).facts
        for odd in (16, 5)
    ]
    assert facts[0] == facts[1]


def test_layers_that_share_their_kv_are_stored_once() -> None:
    tensor = torch.zeros(6, 16)
    cache = RegisteredCache({"a": tensor, "b": tensor}, num_blocks=6, block_tokens=4)
    assert cache.layout.plane_bytes == (64,)


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"a": torch.zeros(5, 16)},  # no dimension of blocks
        {"a": torch.zeros(6, 4, 8)[:, :, ::2]},  # every other value
        {"a": [torch.zeros(6, 4)]},  # recurrent state has several
    ],
)
def test_what_is_no_run_of_bytes_is_refused(tensors: Any) -> None:
    with pytest.raises(InvalidLayout):
        RegisteredCache(tensors, num_blocks=6, block_tokens=4)


# --- identity ---------------------------------------------------------------------------------------------------------


def _identity(**changed: Any) -> CacheIdentity:
    cache = RegisteredCache({"a": changed.pop("tensor", torch.zeros(6, 16))}, num_blocks=6, block_tokens=4)
    given: dict[str, Any] = {
        "architecture": "Llama",
        "weights": bytes(32),
        "model_config": {"rope": {"theta": 1e4}, "_name_or_path": "x"},
        "engine": {"vllm": "0.32.0", "dtype": torch.float32, "backends": {"FLASH"}},
        "tensors": cache.facts,
        "layout": cache.layout.fingerprint,
        "block_tokens": 4,
    }
    return rank_identity(**{**given, **changed})


def test_everything_that_decides_the_bytes_changes_the_identity() -> None:
    same = _identity()
    assert _identity().digest == same.digest
    assert _identity(model_config={"rope": {"theta": 1e4}, "_name_or_path": "y"}).digest == same.digest
    others = [
        _identity(weights=bytes(31) + b"x"),
        _identity(model_config={"rope": {"theta": 2e4}}),
        _identity(engine={"vllm": "0.33.0", "dtype": torch.float32, "backends": {"FLASH"}}),
        _identity(engine={"vllm": "0.32.0", "dtype": torch.float32, "backends": {"OTHER"}}),
        _identity(tensor=torch.zeros(6, 16, dtype=torch.int32)),  # as many bytes
        _identity(tensor=torch.zeros(6, 4, 4)),
        _identity(tensor=torch.zeros(6, 4, 4).transpose(1, 2)),
        _identity(block_tokens=8),
    ]
    assert len({one.digest for one in [same, *others]}) == 1 + len(others)


def test_more_blocks_are_the_same_cache() -> None:
    small = RegisteredCache({"a": torch.zeros(2, 6, 16)}, num_blocks=6, block_tokens=4)
    large = RegisteredCache({"a": torch.zeros(2, 60, 16)}, num_blocks=60, block_tokens=4)
    assert (small.facts, small.layout) == (large.facts, large.layout)


def test_what_has_no_value_is_no_identity() -> None:
    with pytest.raises(InvalidConfig, match="no value"):
        plain({"hook": object()})


def _facts(rank: int, world: int, identity: CacheIdentity) -> RankFacts:
    return RankFacts(
        rank=rank, world=world, block_tokens=4, plane_bytes=(64,), num_blocks=6, identity=as_fields(identity)
    )


def test_ranks_have_one_identity_together() -> None:
    one = _identity()
    assert engine_identity([_facts(0, 1, one)]).digest == one.digest
    both = [_facts(0, 2, one), _facts(1, 2, one)]
    assert engine_identity(both).root == engine_identity(both[::-1]).root != one.root
    other = [both[0], _facts(1, 2, _identity(tensor=torch.zeros(6, 4, 4)))]
    assert engine_identity(other).root != engine_identity(both).root
    with pytest.raises(InvalidConfig, match="these answered"):
        engine_identity(both[:1])
    with pytest.raises(InvalidConfig, match="same weights"):
        engine_identity([both[0], _facts(1, 2, _identity(weights=b"x" * 32))])


def test_weights_count_by_content(tmp_path: Path) -> None:
    model, copy, memory = tmp_path / "m", tmp_path / "n", tmp_path / "c" / "weights.json"
    for path in (model, copy):
        path.mkdir()
        (path / "model.safetensors").write_bytes(b"weights")
        (path / "config.json").write_text("{}")
    first = weights_digest(model, memory)
    assert weights_digest(copy, None) == weights_digest(model, memory) == first
    (model / "model.safetensors").write_bytes(b"weighty")  # as long, and in the same second
    changed = weights_digest(model, memory)
    assert changed != first
    memory.write_text("damaged")
    assert weights_digest(model, memory) == changed
    (model / "model.safetensors").unlink()
    with pytest.raises(InvalidConfig, match="holds no weights"):
        weights_digest(model, memory)


def test_adapters_count_by_content(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"a")
    first = adapter_digest(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert adapter_digest(tmp_path) != first


# --- names of blocks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_a_router_makes_the_same_keys_from_a_node_s_heartbeat(salt: str | None) -> None:
    """It knows the digest of the identity and the block size only, and finds the blocks in the index by them."""
    identity = _identity()
    tokens = list(range(3 * identity.block_tokens + 1))
    prompt = Namer(identity).prompt(_request(cache_salt=salt))
    assert prompt is not None
    root = root_of(identity.digest, (salt or "").encode())
    assert prompt.extend(tokens, 3) == block_keys(tokens, parent=root, block_tokens=identity.block_tokens)


def _request(**more: Any) -> Any:
    return SimpleNamespace(
        **{"prompt_embeds": None, "lora_request": None, "mm_features": (), "cache_salt": None, **more}
    )


def _keys(namer: Namer, tokens: list[int], **more: Any) -> list[BlockKey] | None:
    prompt = namer.prompt(_request(**more))
    return None if prompt is None else prompt.extend(tokens, len(tokens) // 4)


def test_what_a_block_depends_on_is_in_its_name() -> None:
    namer = Namer(_identity(), digest=lambda path: str(path).encode().ljust(32, b"-"))
    tokens = list(range(12))

    def image(name: str) -> Any:
        return SimpleNamespace(modality="image", identifier=name, mm_position=SimpleNamespace(offset=5, length=2))

    loras = {name: SimpleNamespace(lora_path=name, lora_int_id=at) for at, name in enumerate(("p", "q"))}
    for lora in loras.values():
        assert _keys(namer, tokens, lora_request=lora) is None, "not before its content is known"
    while (
        _keys(namer, tokens, lora_request=loras["p"]) is None or _keys(namer, tokens, lora_request=loras["q"]) is None
    ):
        pass
    plain_keys = _keys(namer, tokens)
    assert plain_keys is not None
    assert plain_keys == _keys(namer, tokens)
    found = [
        plain_keys,
        _keys(namer, tokens, cache_salt="a"),
        _keys(namer, tokens, cache_salt="b"),
        _keys(namer, tokens, lora_request=loras["p"]),
        _keys(namer, tokens, lora_request=loras["q"]),
    ]
    assert len({keys[0] for keys in found if keys is not None}) == 5
    seen, other = _keys(namer, tokens, mm_features=(image("x"),)), _keys(namer, tokens, mm_features=(image("y"),))
    assert seen is not None
    assert other is not None
    assert seen[0] == other[0] == plain_keys[0], "what comes before an image is shared"
    assert len({seen[1], other[1], plain_keys[1]}) == 3
    assert len({seen[2], other[2], plain_keys[2]}) == 3


def test_embeddings_are_never_cached() -> None:
    namer = Namer(_identity())
    assert namer.prompt(_request(prompt_embeds=object())) is None
    assert namer.prompt(_request(prompt_is_token_ids=[True, False])) is None


@pytest.mark.fault("X25")
def test_an_adapter_for_which_there_is_no_thread_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """X25: a RuntimeError in vLLM's scheduler, and an adapter that was being read for ever."""
    namer = Namer(_identity(), digest=lambda path: bytes(32))
    lora = SimpleNamespace(lora_path="p", lora_int_id=1)

    def nobody(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", nobody)
        assert namer.prompt(_request(lora_request=lora)) is None
    while namer.prompt(_request(lora_request=lora)) is None:
        pass


def test_an_adapter_that_cannot_be_read_is_never_cached(tmp_path: Path) -> None:
    namer = Namer(_identity())
    lora = SimpleNamespace(lora_path=str(tmp_path / "nowhere"), lora_int_id=1)
    assert namer.prompt(_request(lora_request=lora)) is None
    while namer._adapters[lora.lora_path, 1] is None:
        pass
    assert namer.prompt(_request(lora_request=lora)) is None


# --- what cannot be cached --------------------------------------------------------------------------------------------


class FullAttentionSpec(SimpleNamespace):
    pass


class SlidingWindowSpec(SimpleNamespace):
    pass


class MambaSpec(SimpleNamespace):
    pass


def _engine(*specs: Any, **more: Any) -> tuple[Any, Any]:
    groups = [
        SimpleNamespace(kv_cache_spec=spec, layer_names=[f"layer.{at}"], host_resident=False)
        for at, spec in enumerate(specs)
    ]
    config = {
        "parallel_config": SimpleNamespace(decode_context_parallel_size=1),
        "speculative_config": None,
        "cache_config": SimpleNamespace(calculate_kv_scales=False),
        "load_config": SimpleNamespace(load_format="auto"),
    }
    return SimpleNamespace(**{**config, **more}), SimpleNamespace(kv_cache_groups=groups)


def test_what_we_cannot_store_is_refused_by_name() -> None:
    full = FullAttentionSpec(block_size=4)
    engine_facts.require_cacheable(*_engine(full))
    wrong: list[tuple[Any, str]] = [
        (_engine(SlidingWindowSpec()), "SlidingWindowSpec"),
        (_engine(full, MambaSpec()), "MambaSpec"),
        (_engine(full, full), "2 KV groups"),
        (_engine(FullAttentionSpec(non_causal=True)), "not causal"),
        (_engine(full, parallel_config=SimpleNamespace(decode_context_parallel_size=2)), "decode_context_parallel"),
        (_engine(full, speculative_config=SimpleNamespace(method="eagle")), "eagle"),
        (_engine(full, cache_config=SimpleNamespace(calculate_kv_scales=True)), "scales"),
        (_engine(full, load_config=SimpleNamespace(load_format="dummy")), "dummy"),
        (_engine(full, model_config=SimpleNamespace(enable_sleep_mode=True)), "enable_sleep_mode"),
    ]
    for engine, word in wrong:
        with pytest.raises(InvalidConfig, match=word):
            engine_facts.require_cacheable(*engine)
    engine_facts.require_cacheable(*_engine(full, speculative_config=SimpleNamespace(method="ngram")))


def test_a_sync_load_is_refused_where_it_could_not_be_taken_back() -> None:
    on = {name: SimpleNamespace(device_type=name) for name in ("cpu", "cuda")}
    overlapping, orderly = (SimpleNamespace(max_concurrent_batches=num, device_config=on["cuda"]) for num in (2, 1))
    engine_facts.require_orderly(orderly, sync=True)
    engine_facts.require_orderly(overlapping, sync=False)
    with pytest.raises(InvalidConfig, match="no-async-scheduling"):
        engine_facts.require_orderly(overlapping, sync=True)
    second = {"max_concurrent_batches": 1, "use_v2_model_runner": True}  # which is vLLM's own on CPUs, whatever it says
    engine_facts.require_orderly(SimpleNamespace(**second, device_config=on["cpu"]), sync=True)
    engine_facts.require_orderly(SimpleNamespace(**second, device_config=on["cuda"]), sync=False)
    with pytest.raises(InvalidConfig, match="VLLM_USE_V2_MODEL_RUNNER"):
        engine_facts.require_orderly(SimpleNamespace(**second, device_config=on["cuda"]), sync=True)


# --- what others hear -------------------------------------------------------------------------------------------------


class _Listener:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    def offer(self, moves: Any) -> None:
        self.heard += moves


def test_the_device_is_what_vllm_says_it_is() -> None:
    listener = _Listener()
    teller = Teller(events=True, listener=listener)
    keys = [BlockKey(bytes([at]) * 32) for at in range(4)]
    root = BlockKey(bytes(32))
    there = {"h0", "h1", "h2"}
    teller.is_cached = there.__contains__
    request = SimpleNamespace(block_hashes=["h0", "h1", "h2", "h3"], all_token_ids=list(range(16)))
    teller.offer([Stored(tier="device", keys=(keys[0],), parent=root, depth=0)])
    assert listener.heard == [], "the brain does not know the device"
    teller.computed(keys, request, start=0, parent=root, size=4)
    assert listener.heard == [Stored(tier="device", keys=tuple(keys[:3]), parent=root, depth=0)]
    teller.watch()
    assert len(listener.heard) == 1
    there.remove("h1")
    teller.watch()
    assert listener.heard[1:] == [Removed(tier="device", keys=(keys[1],))]


def test_events_of_tiers_have_vllms_hashes() -> None:
    teller = Teller(events=True)
    keys = [BlockKey(bytes([at]) * 32) for at in range(3)]
    root = BlockKey(bytes(32))
    request = SimpleNamespace(block_hashes=["h0", "h1"], all_token_ids=list(range(12)))
    teller.computed(keys, request, start=0, parent=root, size=4)
    teller.offer(
        [Stored(tier="host", keys=tuple(keys[1:]), parent=keys[0], depth=1), Removed(tier="disk", keys=(keys[0],))]
    )
    (came, named), (went, gone) = teller.take()
    assert (came.tier, [(one.hash, one.parent, one.tokens) for one in named]) == ("host", [("h1", "h0", (4, 5, 6, 7))])
    assert (went.tier, [one.hash for one in gone]) == ("disk", ["h0"])
    teller.offer([TierLost(tier="host")])
    assert teller.take() == [(TierLost(tier="host"), [])]
    assert teller.take() == []


def test_counters_cross_processes_as_what_grew() -> None:
    metrics, clock = Metrics(), FakeClock()
    counted = Counted(metrics, clock=clock)
    metrics.count("hit_tokens_total", 5, tier="host")
    first = counted.grown()
    (title,) = first
    assert labels_of(title) == ("hit_tokens_total", ("host",))
    metrics.count("hit_tokens_total", 2, tier="host")
    assert counted.grown() == {}, "asked a moment ago"
    clock.advance(1.0)
    assert counted.grown() == {title: 2}
    assert merged(first, {title: 2, "x": 1}) == {title: 7, "x": 1}
    assert labels_of('a{b="c\\"d",e="f,g"}') == ("a", ('c"d', "f,g"))


def test_deadlines_move_to_the_workers_clock() -> None:
    orders = Orders(sent_s=100.0, leaving=(("r", (1,), 105.0),))
    assert orders.on_clock(7.0).leaving == (("r", (1,), 12.0),)
    assert replace(orders, sent_s=100.0).on_clock(100.0) == orders


def test_steps_are_timed_from_outside() -> None:
    clock = FakeClock()
    heard: list[tuple[int, int, float]] = []
    pacer = Pacer(lambda *said: heard.append(said), clock=clock)
    pacer.begun([(0, 100), (50, 2)], waits=False)
    clock.advance(2.0)
    pacer.begun([(100, 100)], waits=False)  # while the first is in flight
    clock.advance(1.0)
    pacer.ended()
    assert heard.pop() == (102, 100 * 99 // 2 + 2 * 50 + 1, 3.0)
    clock.advance(4.0)
    pacer.ended()
    assert heard.pop() == (100, 100 * 100 + 100 * 99 // 2, 4.0)
    pacer.begun([(0, 100)], waits=True)
    pacer.ended()
    pacer.begun([], waits=False)
    pacer.ended()
    pacer.ended()
    assert heard == []


# --- layouts ----------------------------------------------------------------------------------------------------------


def _layered(*backends: Any, device: str = "cuda", block: int = 16, said: bool = False) -> Any:
    layers = {
        f"layer.{at}": SimpleNamespace(get_attn_backend=lambda one=one: one, get_kv_cache_spec=lambda _: None)
        for at, one in enumerate(backends)
    }
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        cache_config=SimpleNamespace(block_size=block, user_specified_block_size=said),
        compilation_config=SimpleNamespace(static_forward_context={**layers, "rope": object()}),
    )


def _reads(layouts: tuple[str, ...] | None, *sizes: Any) -> Any:
    names = None if layouts is None else tuple(SimpleNamespace(name=name) for name in layouts)
    return SimpleNamespace(
        supported_kv_cache_layouts=lambda: names, get_supported_kernel_block_sizes=lambda spec: list(sizes)
    )


def test_a_block_is_one_run_where_every_backend_reads_it_whole() -> None:
    of = engine_facts.one_run_layout
    any_of, sixteen = _reads(None, SimpleNamespace(base=16)), SimpleNamespace(base=16)
    assert of(_layered(any_of)) == of(_layered(any_of, any_of, block=128)) == "BLNHC"
    assert of(_layered(_reads(("LBNHC", "BLNHC"), sixteen))) == "BLNHC"
    assert of(_layered(any_of, _reads(("LBNHC",), sixteen))) is None, "one does not read it"
    assert of(_layered(_reads(None, 64), block=64)) == "BLNHC"
    assert of(_layered(_reads(None, 64), block=128)) is None, "vLLM would have to split blocks, and could not"
    assert of(_layered(any_of, device="cpu")) is None


def test_where_layers_are_in_other_processes_a_size_that_was_chosen_is_left_to_vllm() -> None:
    assert engine_facts.one_run_layout(_layered()) == "BLNHC"
    assert engine_facts.one_run_layout(_layered(said=True)) is None


def test_the_layout_is_ours_by_default_and_vllm_s_if_asked() -> None:
    assert [read_config(extra).layout for extra in ({}, {"layout": None}, {"layout": "LBHNC"})] == [
        "auto",
        None,
        "LBHNC",
    ]
