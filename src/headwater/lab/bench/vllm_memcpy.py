"""A contender for `bench vllm`: vLLM's own offloading, its scheduler, its manager and its LRU, with memcpy as the copy.

What vLLM ships copies with CUDA or XPU streams and refuses to start on a CPU. Here only the part that copies is another
one, and as plain as can be: whole blocks, one memcpy for each block of each layer, done when the call returns, nothing
verified. vLLM loads this module by its path; nothing else imports it. Its times say nothing about vLLM's way on a GPU.
"""

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class MemcpyWorker(OffloadingWorker):  # type: ignore[misc,unused-ignore]
    """Copies between the engine's blocks and host memory that was touched before; never beside anything else."""

    def __init__(self, spec: CPUOffloadingSpec, kv_caches: Any) -> None:
        if spec.blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError("one group of layers, and chunks of one block")
        self._device = [cache.tensor.view(torch.int8) for cache in kv_caches.tensors]
        self._host = [torch.ones(spec.num_chunks, cache[0].numel(), dtype=torch.int8) for cache in self._device]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """From the engine's blocks."""
        return self._copy(job_id, (self._device, src_spec.block_ids), (self._host, dst_spec.block_ids))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """To the engine's blocks."""
        return self._copy(job_id, (self._host, src_spec.block_ids), (self._device, dst_spec.block_ids))

    def get_finished(self) -> list[TransferResult]:
        """All that was handed in."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is ever under way."""

    def _copy(self, job_id: int, source: tuple[Any, Any], target: tuple[Any, Any]) -> bool:
        begin_s, num_bytes = time.perf_counter(), 0
        pairs = list(zip(source[1].tolist(), target[1].tolist(), strict=True))
        for layer_from, layer_to in zip(source[0], target[0], strict=True):
            bytes_from, bytes_to = layer_from.numpy(), layer_to.numpy()
            for at, to in pairs:
                bytes_to[to] = bytes_from[at]
            num_bytes += len(pairs) * bytes_to.shape[1]
        took_s = time.perf_counter() - begin_s
        self._done.append(TransferResult(job_id=job_id, success=True, transfer_size=num_bytes, transfer_time=took_s))
        return True


class MemcpyOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc,unused-ignore]
    """vLLM's CPU offloading with that worker. What vLLM looks for by name."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The one worker of this process."""
        if not self._worker:
            self._worker: OffloadingWorker = MemcpyWorker(self, kv_caches)
        return self._worker
