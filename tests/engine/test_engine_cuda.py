"""The models on a GPU: what a CPU cannot show. Kernels that know causality with a context, and no waiting in a step."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from headwater.build import open_cache
from headwater.config.cache import CacheConfig
from headwater.engine.attention.base import causal_attention
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.loader import load_model
from headwater.engine.make_model import FAMILIES, make_model, random_model
from headwater.engine.models.base import Computed, Model, Span
from headwater.engine.request import Output, Request, Sampling
from headwater.transfer.device.arena import DeviceCache, create_kv_cache

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

KINDS = [(family, "auto") for family in FAMILIES] + [("llama", "fp8"), ("deepseek_v32", "fp8")]
SLOTS = (9, 2, 30, 4, 31, 0, 17)
SIZES = (33, 20, 1, 5, 31)  # a prompt, a chunk with a context, a token, a few, another chunk


def tokens(count: int = 90) -> list[int]:
    return torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def run(model: Model, slots: Sequence[int] = SLOTS, *, dirt: int = 0) -> torch.Tensor:
    planes = create_kv_cache(model.layout, 40, model.device)
    for rows in planes.rows:
        rows.fill_(dirt)
    return torch.cat([model.forward(planes, [Span(part, at, slots, len(part))]).logits for at, part in chunks()]).cpu()


def chunks() -> Iterator[tuple[int, list[int]]]:
    ids, at = tokens(), 0
    for size in SIZES:
        yield at, ids[at : at + size]
        at += size


@pytest.mark.parametrize(("family", "kv"), KINDS)
def test_a_gpu_says_in_fp32_what_a_cpu_says(family: str, kv: str, tmp_path: Path) -> None:
    make_model(family, tmp_path / "model")
    models = [load_model(tmp_path / "model", kv=kv, device=device) for device in ("cpu", "cuda")]
    assert models[0].identity == models[1].identity
    on_cpu, on_gpu = (run(model) for model in models)
    torch.testing.assert_close(on_gpu, on_cpu, atol=3e-2 if kv == "fp8" else 1e-3, rtol=0)


@pytest.mark.parametrize(("family", "kv"), KINDS)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_slots_make_not_one_bit_of_difference(family: str, kv: str, dtype: str) -> None:
    model = random_model(FAMILIES[family], device="cuda", dtype=dtype, kv=kv)
    once = run(model)
    assert torch.isfinite(once).all()
    assert torch.equal(run(model), once)
    assert torch.equal(run(model, SLOTS[::-1], dirt=0xFF), once)


@pytest.mark.parametrize(("new", "total"), [(512, 512), (512, 2048), (300, 1111), (17, 4000)])
@pytest.mark.parametrize("dim", [64, 100, 128, 192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_causal_attention_aligns_the_last_query_with_the_last_key(
    new: int, total: int, dim: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    q = torch.randn(new, 8, dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(2, total, dim, device="cuda", dtype=dtype) for _ in range(2))
    out = causal_attention(q, k, v, scale=dim**-0.5).double()
    wide = [x.double().repeat_interleave(4, dim=0) for x in (k, v)]
    scores = q.double().transpose(0, 1) @ wide[0].transpose(1, 2) * dim**-0.5
    seen = torch.ones(new, total, dtype=torch.bool, device="cuda").tril(total - new)
    wanted = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ wide[1]).transpose(0, 1)
    torch.testing.assert_close(out, wanted, atol=2e-5 if dtype == torch.float32 else 2e-2, rtol=0)


@contextmanager
def no_waiting() -> Iterator[None]:
    """An operation that makes the host wait for the device raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("family", "kv"), KINDS)
def test_a_step_never_waits_for_the_device(family: str, kv: str) -> None:
    model = random_model(FAMILIES[family], device="cuda", dtype="bf16", kv=kv)
    planes: DeviceCache = create_kv_cache(model.layout, 40, "cuda")
    steps = [
        [Span(tokens(60), 0, SLOTS)],
        [Span(tokens(30), 60, SLOTS), Span([1], 20, range(20, 23)), Span([1], 35, range(23, 26))],
        [Span([1], 90, SLOTS)],
    ]
    for spans in steps:
        model.forward(planes, spans)  # kernels are chosen and loaded
    for spans in steps:
        with no_waiting():
            computed = model.forward(planes, spans)
        assert torch.isfinite(computed.logits).all()
        assert all(computed.finite())


def test_writers_stand_back_exactly_while_the_device_waits_for_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model(FAMILIES["llama"], device="cuda", dtype="bf16")
    heard: list[object] = []
    forward = model.forward

    def step(*args: Any, **options: Any) -> Computed:
        heard.append("launch")
        out = forward(*args, **options)
        heard.append("launched")
        return out

    monkeypatch.setattr(model, "forward", step)
    config = CacheConfig(num_slots=40, block_tokens=model.block_tokens, block_bytes=model.layout.page_bytes)
    over = threading.Event()
    with (
        create_kv_cache(model.layout, 40, "cuda") as planes,
        open_cache(config, {}, None, layout=model.layout, identity=model.identity.digest) as cache,
    ):
        monkeypatch.setattr(cache, "throttle_saves", lambda *, on: heard.append(on))
        with Engine(model, planes, Connector(cache, model.identity), EngineConfig(step_tokens=64)) as engine:
            sampling = Sampling(max_tokens=2, ignore_eos=True)

            def listen(output: Output) -> None:
                if output.finish is not None:
                    over.set()

            engine.submit(Request(name="one", prompt=tokens(100), sampling=sampling, listen=listen))
            assert over.wait(60)
    steps = heard[heard.index(True) :]  # the warm-up says nothing
    once = [True, "launch", "launched", False]
    assert steps == once * 3 + [True, False]  # two chunks and a token; then nothing is left to launch
