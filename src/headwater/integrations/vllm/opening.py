"""Who moves a worker's blocks: a process beside vLLM's worker, or threads of this one; opened while vLLM warms up."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from headwater.core.errors import InvalidConfig, InvalidLayout, RankUnavailable
from headwater.integrations.vllm.build import OpenWorker, open_worker
from headwater.integrations.vllm.executor import ExecutorProcess, Starting, give_up_ahead, take_begun
from headwater.integrations.vllm.registered import RegisteredCache, say_planes
from headwater.integrations.vllm.settings import ConnectorConfig, ExecutorKind

log: Final = logging.getLogger("vllm.headwater")  # vLLM shows its own loggers


class Opening:
    """`begin` with the KV, `wait` when vLLM has warmed up; then there is a `worker`."""

    def __init__(self, config: ConnectorConfig, *, overlapping: int) -> None:
        """`overlapping`: steps that vLLM begins before it has heard of the first of them."""
        self.worker: OpenWorker | ExecutorProcess | None = None
        self._config = config
        self._overlapping = overlapping
        self._starting: Starting | None = None
        self._open_here: Callable[[], None] | None = None

    @property
    def is_far(self) -> bool:
        """Whether blocks are moved by another process."""
        return isinstance(self.worker, ExecutorProcess)

    def begin(self, device: RegisteredCache, *, identity: bytes, rank: int, world: int) -> None:
        """Have a process get ready, or open threads: then it blocks, while memory is registered.

        Raises InvalidConfig if a process is wanted and cannot be had.
        """
        on_gpu = device.device.type == "cuda"
        self._open_here = partial(self._open_threads, device, identity=identity, rank=rank, world=world)
        kind = self._config.executor
        if kind is ExecutorKind.PROCESS or (kind is ExecutorKind.AUTO and on_gpu):
            try:
                planes = say_planes(device)
                self._starting = take_begun(self._config, on_gpu=on_gpu)
                self._starting.show(planes, identity=identity, rank=rank, world=world)
            except (InvalidLayout, OSError, ValueError) as error:
                self.give_up()
                self._require_threads(error)
        if self._starting is None:
            give_up_ahead()
            self._open_here()

    def wait(self) -> None:
        """Blocks until a process that gets ready is so; if it fails, until threads are. Raises InvalidConfig."""
        starting, self._starting = self._starting, None
        if starting is None or self._open_here is None:
            return
        try:
            self.worker = executor = starting.wait(overlapping=self._overlapping)
        except RankUnavailable as error:
            self._require_threads(error)
            self._open_here()
            return
        log.info("Headwater: blocks are moved by process %d", executor.process.pid)

    def give_up(self) -> None:
        """One that gets ready is not wanted any more; idempotent."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.give_up()
        give_up_ahead()

    def _open_threads(self, device: RegisteredCache, **facts: Any) -> None:
        self.worker = worker = open_worker(self._config, device, overlapping=self._overlapping, **facts)
        worker.get_ready(lambda told: log.info("Headwater: %s", told))

    def _require_threads(self, error: Exception) -> None:
        """Say that threads have to do. Raises InvalidConfig if they are not wanted."""
        if self._config.executor is ExecutorKind.PROCESS:
            raise InvalidConfig(f"executor=process: {error}") from error
        log.warning("Headwater: %s. Blocks are moved by threads of this process, which slows it down a little", error)
