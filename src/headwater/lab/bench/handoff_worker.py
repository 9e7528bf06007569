"""One end of `headwater bench handoff`: an engine of one role in a process of its own, told what to do line by line.

    python -m headwater.lab.bench.handoff_worker '{"role": "prefill", ...}'

A line of JSON in, a line of JSON out; the first one out says that the engine runs. Times are of the monotonic clock,
which all processes of a machine share. Not here: what is measured (`handoff.py`).
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import xxhash

from headwater.build import Running, open_engine
from headwater.config.serve import ServeConfig
from headwater.core.errors import HeadwaterError
from headwater.disagg.protocol import decode
from headwater.engine.make_model import random_model
from headwater.engine.models.base import Model
from headwater.engine.request import Finish, Output, Request, Sampling, Sending, Taking
from headwater.lab.bench.shapes import COMMON, SHAPES

WAIT_S: Final = 300.0


def prompt_of(model: Model, num_tokens: int, seed: int) -> list[int]:
    """The same random prompt in every process."""
    generator = torch.Generator().manual_seed(seed + (1 << 24))
    found: list[int] = torch.randint(3, model.vocab_size, (num_tokens,), generator=generator).tolist()
    return found


class End:
    """One engine and its answers."""

    def __init__(self, running: Running, model: Model) -> None:
        self._running = running
        self._model = model
        self._number = 0
        self.answers: Final[dict[str, Callable[[dict[str, Any]], dict[str, Any]]]] = {
            "send": self.send,
            "take": self.take,
            "ask": self.ask,
            "blocks": self.blocks,
            "copies": self.copies,
        }

    def send(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Compute a prompt and send it; the ticket, and when the first token was chosen."""
        request, outputs, _ = self._run(asked, Sending(until_s=time.monotonic() + WAIT_S))
        last = outputs[-1]
        if last.finish is not Finish.SENT or last.ticket is None or last.usage is None:
            raise HeadwaterError(f"nothing was sent: {last.error or last.finish}")
        return {
            "ticket": last.ticket.encode(),
            "chosen_s": request.first_token_s,
            "ttft_s": last.usage.ttft_s,
            "pool_s": last.usage.pool_s,
            "own_bytes": last.usage.num_pool_bytes,
        }

    def take(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Take a prompt over and go on."""
        before = self._running.engine.num_computed_tokens
        taking = Taking(ticket=decode(asked["ticket"]), until_s=time.monotonic() + WAIT_S, recompute=False)
        return self._answered(asked, taking) | {
            "computed_tokens": self._running.engine.num_computed_tokens - before,
        }

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        """An ordinary request; with a salt of its own it finds nothing, and is computed as one that is sent."""
        return self._answered(asked, None)

    def _answered(self, asked: dict[str, Any], handoff: Taking | None) -> dict[str, Any]:
        _, outputs, first_s = self._run(asked, handoff)
        last = outputs[-1]
        if last.finish is not Finish.LENGTH or last.usage is None:
            raise HeadwaterError(f"no answer: {last.error or last.finish}")
        return {
            "tokens": [token for output in outputs for token in output.tokens],
            "told_s": first_s,
            "pool_s": last.usage.pool_s,
            "total_s": last.usage.total_s,
        }

    def blocks(self, asked: dict[str, Any]) -> dict[str, Any]:
        """A digest of the KV of a prompt's full blocks, as it lies on the device."""
        planes = self._running.engine.planes
        keys = decode(asked["ticket"]).keys
        with self._running.cache.still() as brain:
            known = {key: slot for key, _, slot in brain.blocks()}
        digest = xxhash.xxh3_128()
        for row in planes.rows:
            slots = torch.tensor([known[key] for key in keys if key in known], device=row.device)
            digest.update(row[slots].cpu().numpy().tobytes())
        return {"digest": digest.hexdigest(), "num_blocks": sum(key in known for key in keys)}

    def copies(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Two copies of so many bytes, contiguous and pinned: to the host, and to the device."""
        device = self._model.device
        cuda = device.type == "cuda"
        host = torch.zeros(asked["num_bytes"], dtype=torch.uint8, pin_memory=cuda)
        there = torch.zeros(asked["num_bytes"], dtype=torch.uint8, device=device)
        times: list[list[float]] = [[], []]
        for _ in range(asked["rounds"] + 1):
            for way, (target, source) in enumerate(((host, there), (there, host))):
                begin_s = time.perf_counter()
                target.copy_(source, non_blocking=True)
                if cuda:
                    torch.cuda.synchronize(device)
                times[way].append(time.perf_counter() - begin_s)
        return {"out_s": times[0][1:], "in_s": times[1][1:]}

    def _run(
        self, asked: dict[str, Any], handoff: Sending | Taking | None
    ) -> tuple[Request, list[Output], float | None]:
        outputs: list[Output] = []
        over = threading.Event()
        first_s: list[float] = []

        def listen(output: Output) -> None:
            if output.tokens and not first_s:
                first_s.append(time.monotonic())
            outputs.append(output)
            if output.finish is not None:
                over.set()

        self._number += 1
        request = Request(
            name=f"{self._number}",
            prompt=prompt_of(self._model, asked["num_tokens"], asked["seed"]),
            sampling=Sampling(max_tokens=asked["answer"], temperature=0, ignore_eos=True),
            listen=listen,
            handoff=handoff,
            salt=asked.get("salt", "").encode(),
        )
        self._running.engine.submit(request)
        if not over.wait(WAIT_S):
            raise HeadwaterError(f"no end in {WAIT_S:g} s")
        if not self._running.cache.drain(WAIT_S):
            raise HeadwaterError("the cache did not come to rest")
        return request, outputs, first_s[0] if first_s else None


def main(line: str) -> None:
    """Run one end until its input ends."""
    options = json.loads(line)
    device = options["device"]
    model = random_model(
        {**COMMON, **SHAPES[options["shape"]]},
        name=options["shape"],
        device=device,
        dtype="bf16" if device != "cpu" else "fp32",
        block_tokens=options["block_tokens"],
    )
    config = ServeConfig(
        model=Path(options["tokenizer"]),
        role=options["role"],
        pool=options["pool"],
        block_tokens=options["block_tokens"],
        num_blocks=options["num_blocks"],
        step_tokens=options["step_tokens"],
    )
    with open_engine(config, model=model) as running:
        end = End(running, model)
        _say({"page_bytes": model.layout.page_bytes})
        for asked in map(json.loads, sys.stdin):
            _say(end.answers[asked["do"]](asked))


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
