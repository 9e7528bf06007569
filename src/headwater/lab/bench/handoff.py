"""`headwater bench handoff`: from the first token chosen in one engine to the same token told by another one.

Two engine processes with the same random weights, a pool in shared memory between them; each prompt is computed by one
and handed to the other. The time is that between two moments on one clock: the prefill engine has chosen the first
token, the decode engine says it, with every block verified in its slot. Beside it: two plain copies of the same bytes,
contiguous and pinned, to the host and to the device, which is the least that moving them can cost.

Equal: the KV of all full blocks, byte for byte, in both processes, and the tokens of both.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.engine.make_model import make_model
from headwater.lab.bench.report import BenchReport, Samples, Tell
from headwater.lab.bench.shapes import SHAPES, require_shape
from headwater.storage.scratch import memory_root

_ANSWER: Final = 8
_NOTES: Final = {
    "lengths": "per prompt length, medians in ms",
    "handoff_ms": "from the first token chosen at prefill to the same token told by decode, all blocks verified",
    "write_ms, read_ms": "what the two engines say of it: until the pool had every block, until the device had",
    "copies_ms": "the same bytes by two plain copies, contiguous and pinned: to the host, and to the device",
    "ratio": "handoff / copies",
    "equal": "KV bytes of all full blocks and all tokens were the same at both ends, in every round",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """What to measure."""

    shape: str = "tiny"
    device: str = "cpu"
    lengths: tuple[int, ...] = (2048, 2043)
    block_tokens: int = 64
    step_tokens: int = 2048
    rounds: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        require_shape(self.shape)
        if min(self.rounds, self.block_tokens, self.step_tokens, *self.lengths) < 1:
            raise InvalidConfig("lengths, rounds and token counts must be positive")


class _End:
    """A worker process, from outside."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.facts = self._answer()

    def tell(self, do: str, **asked: Any) -> dict[str, Any]:
        """Have something done. Blocks. Raises HeadwaterError where the process ended."""
        _pipe(self._process.stdin).write(json.dumps({"do": do, **asked}) + "\n")
        _pipe(self._process.stdin).flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise HeadwaterError("an engine's process ended: what it said is above")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def _end(role: str, options: HandoffOptions, pool: str, tokenizer: Path) -> Iterator["subprocess.Popen[str]"]:
    settings = {
        "role": role,
        "pool": pool,
        "tokenizer": str(tokenizer),
        "shape": options.shape,
        "device": options.device,
        "block_tokens": options.block_tokens,
        "step_tokens": options.step_tokens,
        "num_blocks": 4 * (max(options.lengths) // options.block_tokens + 2),
    }
    command = [sys.executable, "-m", "headwater.lab.bench.handoff_worker", json.dumps(settings)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  ourselves
        try:
            yield process
            _pipe(process.stdin).close()
            process.wait(60)
        finally:
            process.kill()


def run(options: HandoffOptions | None = None, *, tell: Tell | None = None) -> BenchReport:
    """Measure. Blocks for minutes on a large shape. Raises HeadwaterError where the two ends differ."""
    options = options if options is not None else HandoffOptions()
    samples = Samples()
    need = _pool_bytes(options)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headwater-pd-", dir=memory_root(need))))
        make_model("llama", place / "tokenizer")  # its tokenizer is not used, and has to be there
        open_local(LocalStoreConfig(directory=place / "pool", limit_bytes=need)).close()
        pool = f"local:{place / 'pool'}"
        processes = [
            stack.enter_context(_end(role, options, pool, place / "tokenizer")) for role in ("prefill", "decode")
        ]
        prefill, decode = (_End(process) for process in processes)
        rows = []
        for done, num_tokens in enumerate(options.lengths):
            if tell is not None:
                tell(f"{num_tokens:,} tokens", done, len(options.lengths))
            rows.append(_measure(prefill, decode, num_tokens, options, samples))
    return BenchReport(
        command="bench handoff",
        options={name: getattr(options, name) for name in options.__slots__},
        results={
            "worst_ratio": max(row["ratio"] for row in rows),
            "equal": all(row["equal"] for row in rows),
            "lengths": rows,
        },
        notes=_NOTES,
        samples=samples.values,
    )


def _measure(prefill: _End, decode: _End, num_tokens: int, options: HandoffOptions, samples: Samples) -> dict[str, Any]:
    num_bytes = -(-num_tokens // options.block_tokens) * prefill.facts["page_bytes"]
    equal = True
    for turn in range(-2, options.rounds):  # the first ones are warmer than nobody
        asked = {"num_tokens": num_tokens, "seed": 1000 * num_tokens + turn, "answer": _ANSWER}
        sent = prefill.tell("send", **asked)
        taken = decode.tell("take", ticket=sent["ticket"], **asked)
        theirs = [end.tell("blocks", ticket=sent["ticket"]) for end in (prefill, decode)]
        own = prefill.tell("ask", salt=f"own {turn}", **asked)
        equal &= theirs[0] == theirs[1] and theirs[0]["num_blocks"] == num_tokens // options.block_tokens
        equal &= own["tokens"] == taken["tokens"] and taken["computed_tokens"] == _ANSWER - 1
        if turn < 0:
            continue
        times = {
            "handoff": taken["told_s"] - sent["chosen_s"],
            "write": sent["pool_s"],
            "read": taken["pool_s"],
            "ttft": sent["ttft_s"],
        }
        for name, seconds in times.items():
            samples.add(f"{num_tokens}_{name}_ms", seconds * 1e3)
    copies = decode.tell("copies", num_bytes=num_bytes, rounds=options.rounds)
    for there, back in zip(copies["out_s"], copies["in_s"], strict=True):
        samples.add(f"{num_tokens}_copies_ms", (there + back) * 1e3)
    row = {name: samples.median(f"{num_tokens}_{name}_ms") for name in ("handoff", "write", "read", "ttft", "copies")}
    handoffs = sorted(samples.values[f"{num_tokens}_handoff_ms"])
    return {
        "tokens": num_tokens,
        "num_bytes": num_bytes,
        **{f"{name}_ms": value for name, value in row.items()},
        "handoff_high_ms": handoffs[-1],
        "ratio": statistics.median(handoffs) / row["copies"],
        "equal": equal,
    }


def _pool_bytes(options: HandoffOptions) -> int:
    shape = SHAPES[options.shape]
    width = 2 if options.device != "cpu" else 4
    of_token = 2 * width * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    return int(4 * (max(options.lengths) + 2 * options.block_tokens) * of_token) + (64 << 20)


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise HeadwaterError("the process has no pipe")
    return pipe
