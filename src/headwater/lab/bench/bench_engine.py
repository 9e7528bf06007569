"""A whole engine with random weights, for benchmarks that ask it one prompt after another."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

import torch

from headwater.build import open_cache
from headwater.build.tiered import open_staging
from headwater.config.cache import CacheConfig, TierConfig
from headwater.core.errors import HeadwaterError
from headwater.engine.connector import Connector
from headwater.engine.engine import Engine, EngineConfig
from headwater.engine.make_model import random_model
from headwater.engine.models.base import Model
from headwater.engine.request import Output, Request, Sampling, Usage
from headwater.lab.bench.shapes import COMMON, SHAPES
from headwater.metrics import Metrics
from headwater.storage.base import Store
from headwater.transfer.device.arena import create_kv_cache

_WAIT_S: Final = 600.0


class BenchEngine:
    """One engine; asks it one prompt at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._number = 0

    def ask(self, *prompts: list[int]) -> list[Usage]:
        """Submit prompts at once, wait for one token of each."""
        over = threading.Semaphore(0)
        found: dict[int, Output] = {}
        for i, prompt in enumerate(prompts):
            self._number += 1

            def listen(output: Output, at: int = i) -> None:
                if output.finish is not None:
                    found[at] = output
                    over.release()

            sampling = Sampling(max_tokens=1, temperature=0, ignore_eos=True)
            self.engine.submit(Request(name=f"{self._number}", prompt=prompt, sampling=sampling, listen=listen))
        for _ in prompts:
            if not over.acquire(timeout=_WAIT_S):
                raise HeadwaterError(f"no answer in {_WAIT_S:g} s")
        usages = [found[i].usage for i in range(len(prompts))]
        if any(usage is None or usage.ttft_s is None for usage in usages):
            raise HeadwaterError(f"a request failed: {[output.error for output in found.values()]}")
        return [usage for usage in usages if usage is not None]

    def rest(self) -> None:
        """Wait until nothing is being written."""
        if not self.engine.connector.cache.drain(_WAIT_S):
            raise HeadwaterError("the cache did not come to rest")


def bench_model(shape: str, *, device: str, block_tokens: int) -> Model:
    """A model of a shape with random weights: bf16 on a GPU, fp32 on a CPU."""
    return random_model(
        {**COMMON, **SHAPES[shape]},
        name=shape,
        device=device,
        dtype="bf16" if device != "cpu" else "fp32",
        block_tokens=block_tokens,
    )


@contextmanager
def bench_engine(
    model: Model,
    stores: dict[str, Store],
    *,
    num_tokens: int,
    step_tokens: int,
    load_timeout_s: float = 5.0,
    kind: type[Connector] = Connector,
) -> Iterator[BenchEngine]:
    """An engine whose device holds one prompt of `num_tokens`, in front of these stores."""
    num_blocks = -(-num_tokens // model.block_tokens) + 2
    config = CacheConfig(
        num_slots=num_blocks,
        block_tokens=model.block_tokens,
        block_bytes=model.layout.page_bytes,
        tiers=tuple(
            TierConfig(name=name, max_queued_bytes=1 << 40, max_queued_s=_WAIT_S, load_timeout_s=load_timeout_s)
            for name in stores
        ),
    )
    with ExitStack() as stack:
        planes = stack.enter_context(create_kv_cache(model.layout, num_blocks, model.device))
        staging = open_staging(planes, stores, stack, metrics=Metrics())
        cache = stack.enter_context(
            open_cache(config, stores, staging, layout=model.layout, identity=model.identity.digest)
        )
        engine = Engine(model, planes, kind(cache, model.identity), EngineConfig(step_tokens=step_tokens))
        stack.enter_context(engine)
        engine.wait_warm(_WAIT_S)
        yield BenchEngine(engine)


def make_prompt(model: Model, num_tokens: int, seed: int) -> list[int]:
    """A prompt of random tokens, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed + (1 << 20))
    found: list[int] = torch.randint(3, model.vocab_size, (num_tokens,), generator=generator).tolist()
    return found
