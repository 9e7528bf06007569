"""Prefill and decode apart under vLLM: two `vllm serve` processes, our router in front, equal to one vLLM alone.

    python -m headwater.lab.campaigns.vllm_pd --requests 50 --kills 2 --json      (with an interpreter that has vLLM)

First requests of mixed lengths, some of them at once, through the router; each answer must be that of a single vLLM
without a connector, and the decode server must have loaded what prefill computed. Then load, under which the decode
server is killed and started again: every request must end by its deadline with the right tokens or an honest error, no
token before a 502, and in the end requests are answered again.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx2

from headwater.build import open_local
from headwater.config.stores import LocalStoreConfig
from headwater.core.errors import HeadwaterError
from headwater.core.node_key import NodeKey
from headwater.disagg.key_file import write_node_key
from headwater.engine.make_model import make_model
from headwater.lab.verify.vllm_scene import KINDS
from headwater.storage.scratch import memory_root

_BLOCK: Final = 32
_ANSWER: Final = 12
_UP_S: Final = 600.0
_DEADLINE_S: Final = 120.0
_POOL_BYTES: Final = 256 << 20
_HEADWATER: Final = (sys.executable, "-P", "-c", "from headwater.cli import app; app()")
_SETTINGS: Final = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONHASHSEED": "0",
}


@dataclass(slots=True)
class RequestTally:
    """What came of the requests of one part of the campaign."""

    requests: int = 0
    right: int = 0
    wrong: int = 0
    late: int = 0
    tokens_before_an_error: int = 0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing happened that may not."""
        return not (self.wrong or self.late or self.tokens_before_an_error) and self.requests > 0


class PdChild:
    """A process that is ended with us."""

    def __init__(self, name: str, command: Sequence[str], log: Path, **environment: str) -> None:
        self.name = name
        self._log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **_SETTINGS, **environment},
            )

    def kill(self) -> None:
        """It and all its children, at once."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self._process.wait()

    def url(self, pattern: str) -> str:
        """What it says of where it is, when it says so. Blocks."""
        until_s = time.monotonic() + _UP_S
        while time.monotonic() < until_s:
            found = re.findall(pattern, self._log.read_text(encoding="utf-8", errors="replace"))
            if found:
                return str(found[-1])
            self.require_running()
            time.sleep(0.2)
        raise HeadwaterError(f"{self.name} did not say where it is; its log is {self._log}")

    def until_well(self, url: str) -> None:
        """Until it answers. Blocks."""
        until_s = time.monotonic() + _UP_S
        while time.monotonic() < until_s:
            try:
                if httpx2.get(f"{url}/health", timeout=5.0, trust_env=False).status_code == 200:
                    return
            except httpx2.HTTPError:
                self.require_running()
            time.sleep(0.3)
        raise HeadwaterError(f"{self.name} does not answer; its log is {self._log}")

    def require_running(self) -> None:
        """Raise HeadwaterError if it has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
            raise HeadwaterError(f"{self.name} ended with exit code {self._process.returncode}:\n{tail}")


class PdStage:
    """A router, and vLLM servers with their nodes."""

    def __init__(self, base: Path, stack: ExitStack) -> None:
        kind = KINDS["gqa"]
        self.model = base / "model"
        make_model(kind.family, self.model, overrides=kind.overrides)
        open_local(LocalStoreConfig(directory=base / "pool", limit_bytes=_POOL_BYTES)).close()
        self._base = base
        self._stack = stack
        self._pool = f"local:{base / 'pool'}"
        self._children: dict[str, PdChild] = {}
        self._ports = {name: _free_port() for name in ("alone", "prefill", "decode")}

    def close(self) -> None:
        """End everything."""
        for child in self._children.values():
            child.kill()

    def url(self, name: str) -> str:
        """Where a vLLM is."""
        return f"http://127.0.0.1:{self._ports[name]}"

    def start_vllm(self, name: str, role: str | None) -> None:
        """Begin to start a vLLM server."""
        command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve", str(self.model)]
        command += ["--served-model-name", "tiny", "--port", str(self._ports[name]), "--host", "127.0.0.1"]
        command += ["--dtype", "float32", "--block-size", str(_BLOCK), "--max-model-len", "2048", "--enforce-eager"]
        if role is not None:
            transfer = {
                "kv_connector": "HeadwaterConnector",
                "kv_connector_module_path": "headwater.integrations.vllm",
                "kv_role": role,
                "kv_connector_extra_config": {"host_directory": None, "disk_directory": None, "pool": self._pool},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        self._children[name] = PdChild(name, command, self._base / f"{name}.log")

    def until_well(self, name: str) -> None:
        """Until a vLLM server answers. Blocks."""
        self._children[name].until_well(self.url(name))

    def kill(self, name: str) -> None:
        """SIGKILL, all of it."""
        self._children[name].kill()

    def start_router(self) -> str:
        """The router and the two nodes; where it answers."""
        log = self._base / "router.log"
        key = ["--node-key-file", str(self._base / "node.key")]
        write_node_key(self._base / "node.key", NodeKey.random())
        child = self._children["router"] = PdChild("router", [*_HEADWATER, "router", "--port", "0", *key], log)
        router = child.url(r"answers on (http://[^/\s]+)")
        for role in ("prefill", "decode"):
            command = [*_HEADWATER, "vllm-node", "--vllm", self.url(role), "--role", role, "--pool", self._pool]
            command += ["--router", router, "--node", f"{role}-node", "--lease", "3", *key]
            log = self._base / f"{role}-node.log"
            child = self._children[f"{role}-node"] = PdChild(f"{role} node", command, log)
            child.url(r"node on (http://[^,\s]+)")
        self._children["router"].until_well(router)
        return router

    def loaded_tokens(self) -> float:
        """Prompt tokens that decode loaded, by its own metrics."""
        text = httpx2.get(f"{self.url('decode')}/metrics", timeout=10.0, trust_env=False).text
        found = re.findall(r"^vllm:external_prefix_cache_hits_total\S* (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)


@contextmanager
def _stage() -> Iterator[PdStage]:
    with (
        tempfile.TemporaryDirectory(prefix="headwater-vllm-pd-", dir=memory_root(_POOL_BYTES)) as base,
        ExitStack() as stack,
    ):
        stage = PdStage(Path(base), stack)
        stack.callback(stage.close)
        yield stage


async def ask(client: httpx2.AsyncClient, url: str, prompt: list[int], *, stream: bool) -> tuple[str, list[int]]:
    """One greedy request: "ok" or what was wrong, and the tokens that came."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": _ANSWER,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    tokens: list[int] = []
    try:
        async with asyncio.timeout(_DEADLINE_S + 5.0):
            headers = {"x-headwater-timeout-s": str(_DEADLINE_S)}
            async with client.stream("POST", f"{url}/v1/completions", json=body, headers=headers) as found:
                if found.status_code != 200:
                    document = json.loads(await found.aread())
                    return f"{found.status_code} {document['error'].get('code')}", tokens
                if not stream:
                    return "ok", list(json.loads(await found.aread())["choices"][0]["token_ids"])
                done = False
                async for line in found.aiter_lines():
                    if not line.startswith("data: "):
                        continue
                    if line == "data: [DONE]":
                        done = True
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        return f"stream {event['error'].get('code')}", tokens
                    for choice in event["choices"]:
                        tokens += choice.get("token_ids") or []
                return ("ok" if done else "stream broken"), tokens
    except TimeoutError:
        return "late", tokens
    except httpx2.HTTPError as error:
        return f"connection {type(error).__name__}", tokens


def _judge(tally: RequestTally, outcome: str, tokens: list[int], right: list[int]) -> None:
    tally.requests += 1
    if outcome == "ok":
        tally.right += tokens == right
        tally.wrong += tokens != right
        return
    if outcome == "late" or outcome.startswith("connection"):
        tally.late += 1
    tally.errors[outcome] = tally.errors.get(outcome, 0) + 1
    if tokens != right[: len(tokens)]:
        tally.wrong += 1
    if tokens and not outcome.startswith("stream"):
        tally.tokens_before_an_error += 1


def prompts_of(seed: int, num: int) -> list[list[int]]:
    """Prompts of mixed lengths, some of which share a prefix."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 200) for _ in range(6 * _BLOCK)]
    lengths = [1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK, 300, 777]
    prompts = []
    for turn in range(num):
        own = [draw.randrange(3, 200) for _ in range(lengths[turn % len(lengths)])]
        prompts.append([*shared[: draw.randrange(7) * _BLOCK], *own] if turn % 3 == 0 else own)
    return prompts


async def _all(url: str, prompts: Sequence[list[int]], *, width: int) -> list[tuple[str, list[int]]]:
    gate = asyncio.Semaphore(width)
    async with httpx2.AsyncClient(timeout=None, trust_env=False) as client:

        async def one(at: int, prompt: list[int]) -> tuple[str, list[int]]:
            async with gate:
                return await ask(client, url, prompt, stream=at % 2 == 1)

        return list(await asyncio.gather(*(one(at, prompt) for at, prompt in enumerate(prompts))))


async def _under_kills(
    stage: PdStage, router: str, prompts: list[list[int]], right: list[list[int]], kills: int
) -> RequestTally:
    """Load while decode dies and comes back."""
    tally, stop = RequestTally(), asyncio.Event()

    async def load(client: httpx2.AsyncClient, lane: int) -> None:
        at = lane
        while not stop.is_set():
            outcome, tokens = await ask(client, router, prompts[at % len(prompts)], stream=at % 2 == 1)
            _judge(tally, outcome, tokens, right[at % len(prompts)])
            at += 3
            if outcome != "ok":
                await asyncio.sleep(0.5)

    async with httpx2.AsyncClient(timeout=None, trust_env=False) as client:
        lanes = [asyncio.create_task(load(client, lane)) for lane in range(3)]
        for _ in range(kills):
            await asyncio.sleep(4.0)
            await asyncio.to_thread(stage.kill, "decode")
            await asyncio.sleep(2.0)
            stage.start_vllm("decode", "kv_consumer")
            await asyncio.to_thread(stage.until_well, "decode")
            before = tally.right
            until_s = time.monotonic() + 60.0
            while tally.right < before + 3 and time.monotonic() < until_s:  # it is found again
                await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*lanes)
    return tally


def run(*, requests: int, kills: int, seed: int = 0, say: Any = lambda text: None) -> dict[str, Any]:
    """The campaign. Blocks for minutes."""
    prompts = prompts_of(seed, requests)
    with _stage() as stage:
        say("one vLLM alone")
        stage.start_vllm("alone", None)
        stage.until_well("alone")
        alone = asyncio.run(_all(stage.url("alone"), prompts, width=1))
        if any(outcome != "ok" for outcome, _ in alone):
            raise HeadwaterError(f"vLLM alone failed: {Counter(outcome for outcome, _ in alone)}")
        right = [tokens for _, tokens in alone]
        stage.kill("alone")
        say("prefill, decode and the router")
        for name, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
            stage.start_vllm(name, role)
        for name in ("prefill", "decode"):
            stage.until_well(name)
        router = stage.start_router()
        say(f"{requests} requests")
        apart = RequestTally()
        for (outcome, tokens), expected in zip(asyncio.run(_all(router, prompts, width=3)), right, strict=True):
            _judge(apart, outcome, tokens, expected)
        loaded = stage.loaded_tokens()
        result: dict[str, Any] = {
            "ok": apart.ok and apart.right == requests and loaded > 0,
            "apart": asdict(apart),
            "loaded_tokens": loaded,
            "prompt_tokens": sum(map(len, prompts)),
        }
        if kills:
            say(f"decode dies {kills} times")
            killed = asyncio.run(_under_kills(stage, router, prompts, right, kills))
            last = asyncio.run(_all(router, prompts[:4], width=1))
            recovered = [tokens for _, tokens in last] == right[:4]
            result |= {"kills": kills, "under_kills": asdict(killed), "recovered": recovered}
            result["ok"] = result["ok"] and killed.ok and killed.right > 0 and recovered
        return result


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main() -> None:
    """Parse, run, tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = run(
        requests=options.requests,
        kills=options.kills,
        seed=options.seed,
        say=lambda text: print(text, file=sys.stderr, flush=True),  # noqa: T201  progress
    )
    command = f"python -m headwater.lab.campaigns.vllm_pd --requests {options.requests} --kills {options.kills}"
    print(json.dumps({**result, "command": command}, indent=None if options.json else 2))  # noqa: T201  the result
    sys.exit(0 if result["ok"] else 1)


if __name__ == "__main__":
    main()
