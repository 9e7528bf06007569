"""Headwater under vLLM: `HeadwaterConnector`, for vLLM's v1 connector interface (written against 0.32).

    vllm serve MODEL --kv-transfer-config
        '{"kv_connector":"HeadwaterConnector","kv_connector_module_path":"headwater.integrations.vllm","kv_role":"kv_both"}'

vLLM owns the device: it allocates blocks, shares them between requests and evicts them, and asks a connector from two
processes. So brain and executor are in different processes, and talk through vLLM's own steps:

    EngineCore: `scheduler.py`                    each worker: `worker.py`
    the brain (`cache/lent.py`), which lends      the executor (`transfer/executor/worker.py`) on the KV tensors
    vLLM's blocks instead of counting slots       that vLLM registered (`registered.py`), and the stores
         |   -- jobs, with the step's metadata -->   |
         |   <-- events, with the step's output --   |
    stores, only to be asked what they have (`step_executor.py`)

On a GPU the executor and its stores are in another process still, beside each worker: `executor.py`.

Nothing of the cache is here: what is looked up, loaded, saved, verified, dropped and counted is decided by the brain
and done by the executor, the same that `headwater serve` runs. The attention store was the other choice: it has no
tiers and no brain, and its calls block.

Nothing here is imported before it is asked for, and only `connector.py` and `stats.py` import vLLM.
"""

from typing import TYPE_CHECKING, Any

from headwater.core.errors import NotInstalled

if TYPE_CHECKING:
    from headwater.integrations.vllm.connector import HeadwaterConnector

__all__ = ["HeadwaterConnector"]


def __getattr__(name: str) -> Any:
    """The connector, when somebody asks for it: then vLLM has to be there. Raises NotInstalled if it is not."""
    if name != "HeadwaterConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from headwater.integrations.vllm.connector import HeadwaterConnector
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("vllm", "torch"):
            raise
        raise NotInstalled(
            f"the vLLM connector runs inside vLLM, and there is no {error.name} here: install headwater into vLLM's "
            "environment (pip install headwater there)"
        ) from error
    return HeadwaterConnector
