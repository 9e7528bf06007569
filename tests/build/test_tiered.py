"""What an engine of one's own begins with: `open_tiered_cache`. Its ordinary use is the README's example."""

from dataclasses import replace
from pathlib import Path

import pytest

from headwater import (
    CacheIdentity,
    CacheTiers,
    DType,
    block_keys,
    config_digest,
    create_kv_cache,
    gqa_layout,
    open_tiered_cache,
)
from headwater.core.errors import InvalidConfig
from headwater.metrics import Metrics

LAYOUT = gqa_layout(num_layers=1, num_kv_heads=2, head_dim=16, block_tokens=16, dtype=DType.BF16)
IDENTITY = CacheIdentity(
    model="m", weights=bytes(32), config=config_digest({}), layout=LAYOUT.fingerprint, block_tokens=16
)
KEYS = block_keys(range(64), parent=IDENTITY.root, block_tokens=16)
WAIT_S = 60.0


def test_without_tiers_the_device_alone_is_the_cache() -> None:
    with create_kv_cache(LAYOUT, 8) as device, open_tiered_cache(device, CacheTiers(), identity=IDENTITY) as cache:
        for request, known in (("first", 0), ("second", 4)):
            cache.match(request, KEYS, root=IDENTITY.root)
            cache.reserve(request, num_blocks=5)
            assert cache.poll(request).num_ready == known
            cache.commit(request, KEYS[known:])
            cache.release(request)


def test_a_tier_that_cannot_be_had_is_left_out_and_the_rest_goes_on(tmp_path: Path, shm: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "somebody's").write_text("file")
    tiers = CacheTiers(
        host_directory=shm / "host", host_bytes=16 << 20, disk_directory=foreign, disk_bytes=16 << 20, pool=None
    )
    metrics = Metrics()
    for known in (0, 4):
        with (
            create_kv_cache(LAYOUT, 8) as device,
            open_tiered_cache(device, tiers, identity=IDENTITY, metrics=metrics) as cache,
        ):
            cache.match("r", KEYS, root=IDENTITY.root)
            cache.wait("r", timeout_s=WAIT_S)
            cache.reserve("r", num_blocks=5)
            assert cache.wait("r", timeout_s=WAIT_S).num_ready == known
            if known:
                assert all((device.tensors["key", 0][slot] == 1.5).all() for slot in range(known))
            device.tensors["key", 0][:] = 1.5
            cache.commit("r", KEYS[known:])
            cache.release("r")
    assert [path.name for path in foreign.iterdir()] == ["somebody's"]


@pytest.mark.parametrize("change", [{"layout": bytes(32)}, {"block_tokens": 32}])
def test_an_identity_of_other_blocks_is_refused(change: dict[str, object]) -> None:
    other = replace(IDENTITY, **change)  # type: ignore[arg-type]
    with (
        create_kv_cache(LAYOUT, 8) as device,
        pytest.raises(InvalidConfig, match="identity is of other blocks"),
        open_tiered_cache(device, CacheTiers(), identity=other),
    ):
        pass
