"""A real vLLM on CPU, in this process, one engine after another: so a test can look at both sides of the connector."""

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_NO_USAGE_STATS="1",
    OMP_NUM_THREADS="1",
    PYTHONHASHSEED="0",
)

import gc
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest

BLOCK = {"gqa": 32, "mla": 16}


class Engine:
    """One vLLM engine, and its connector's two sides."""

    def __init__(self, model: Path, kind: str, extra: dict[str, Any] | None, **options: Any) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        if extra is not None:
            options["kv_transfer_config"] = KVTransferConfig(
                kv_connector="HeadwaterConnector",
                kv_connector_module_path="headwater.integrations.vllm",
                kv_role="kv_both",
                kv_connector_extra_config=extra,
            )
        options = {"num_gpu_blocks_override": 128, "max_model_len": 1024, **options}
        self.llm = LLM(
            str(model), dtype="float32", enforce_eager=True, block_size=BLOCK[kind], disable_log_stats=False, **options
        )
        self.core = self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """What the scheduler's connector has open."""
        return self.core.scheduler.connector._scheduler

    @property
    def worker(self) -> Any:
        """What the worker's connector has open."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    def ask(self, prompts: Sequence[list[int]], max_tokens: int = 12, **more: Any) -> list[Any]:
        """Greedy answers, in order."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        asked = [{"prompt_token_ids": prompt, **more} for prompt in prompts]
        return self.llm.generate(asked, sampling, use_tqdm=False)

    def tokens(self, prompts: Sequence[list[int]], max_tokens: int = 12, **more: Any) -> list[list[int]]:
        """The tokens of greedy answers."""
        return [list(one.outputs[0].token_ids) for one in self.ask(prompts, max_tokens, **more)]

    def settle(self, timeout_s: float = 20.0) -> None:
        """Until everything was saved and heard of, and vLLM has its blocks again."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.worker is not None:
                self.worker.executor.drain(1.0)
            self.llm.llm_engine.step()
            if not self.core.scheduler.has_requests() and not list(self.scheduler.cache.brain.jobs):
                return
            # vLLM steps no more: let the last events be heard
            self.core.scheduler.connector.update_connector_output(_outcome(self.worker))
        raise AssertionError(f"not settled: {list(self.scheduler.cache.brain.jobs)}")

    def empty_device(self) -> None:
        """Let vLLM forget what is on the device."""
        self.settle()
        assert self.llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine, and everything of ours in it."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm, self.core
        gc.collect()


def _outcome(worker: Any) -> Any:
    from vllm.v1.outputs import KVConnectorOutput

    from headwater.integrations.vllm.connector import StepReport

    report = worker.side.report()
    return KVConnectorOutput(kv_connector_worker_meta=None if report is None else StepReport(report))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directories by kind, each made once."""
    base = tmp_path_factory.mktemp("models")
    return lambda kind: models.make(kind, base / kind)


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Options for a host tier and a disk tier of their own."""
    host = Path("/dev/shm") / f"headwater-test-{uuid.uuid4().hex}"
    disk = tmp_path_factory.mktemp("disk")
    yield {
        "host_directory": str(host),
        "host_bytes": 64 << 20,
        "disk_directory": str(disk / "tier"),
        "disk_bytes": 128 << 20,
        "load_when": "always",  # this model is computed in no time
    }
    shutil.rmtree(host, ignore_errors=True)


@pytest.fixture
def engine(model_of: Callable[[str], Path]) -> Callable[..., Any]:
    """Opens an engine for a `with` block."""

    @contextmanager
    def open_engine(kind: str, extra: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
        found = Engine(model_of(kind), kind, extra, **options)
        try:
            yield found
        finally:
            found.close()

    return open_engine
