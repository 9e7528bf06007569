"""Clients that mean no good, for `door_attack.py`: hundreds of connections that keep a server waiting, each in one way.

    python -m headwater.lab.campaigns.door_attackers URL PLAN

PLAN is JSON, how many of each kind. They attack until standard input ends; whoever is cut comes again. Then one JSON
document says, by kind, how often they came and what they heard: a status, or `cut` for a connection that was closed.
`no end` is what must not be: the server kept it for as long as its client liked.
"""

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit

_Attack: TypeAlias = Callable[[asyncio.StreamWriter, random.Random], Coroutine[Any, Any, None]]

PATH: Final = "/v1/completions"
NO_END: Final = "no end"

_AGAIN_S: Final = 0.5
_DRIP_S: Final = 2.0
NO_END_S: Final = 120.0  # longer than any connection may live
_HUGE: Final = 7 << 20
_HEARD_OUT: Final = ("giant", "bomb")  # their answers take as long as the machine has little left for their readers


def _head(length: int | None) -> bytes:
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()


async def _drip(writer: asyncio.StreamWriter, byte: bytes, every_s: float = _DRIP_S) -> None:
    while True:
        writer.write(byte)
        await writer.drain()
        await asyncio.sleep(every_s)


async def silent(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """Says nothing."""
    await asyncio.sleep(NO_END_S)


async def slow_head(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A head that never ends."""
    writer.write(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nx-slow: ".encode())
    await _drip(writer, b"a")


async def slow_body(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A body, byte by byte."""
    writer.write(_head(100_000) + b"{")
    await _drip(writer, b" ")


async def half_body(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """Nearly all of a large one, and then nothing."""
    writer.write(_head(_HUGE) + b'{"prompt": "' + b"a" * (_HUGE - 1000))
    await asyncio.sleep(NO_END_S)


async def unread(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A long stream that nobody reads."""
    body = {"prompt": f"{chance.random()}", "max_tokens": 4000, "stream": True, "ignore_eos": True, "logprobs": 5}
    data = json.dumps(body).encode()
    writer.write(_head(len(data)) + data)
    await _drip(writer, b"\r\n")  # so that we hear when it is cut


async def giant(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A prompt of millions of characters, of one sort or another."""
    piece = chance.choice(["a", " ", "a b", "e\u0301", "\u4e2d", "\U0001f600"])
    data = json.dumps({"prompt": piece * (_HUGE // (len(json.dumps(piece)) - 2)), "max_tokens": 1}).encode()
    writer.write(_head(len(data)) + data)
    await asyncio.sleep(NO_END_S)


async def bomb(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A body that is small as text and large as an object."""
    data = b'{"prompt": 5, "x": [' + b"{}," * (_HUGE // 3) + b"{}]}"
    writer.write(_head(len(data)) + data)
    await asyncio.sleep(NO_END_S)


async def crumbs(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A body in chunks of one byte."""
    writer.write(_head(None))
    await _drip(writer, b"1\r\n \r\n" * 1000, 0.01)


async def many_lines(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A head of thousands of tiny headers, or a body with as many behind it."""
    lines = b"a:\r\n" * 4050 + b"\r\n"
    head = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    writer.write(chance.choice([head + lines, _head(None) + b"2\r\n{}\r\n0\r\n" + lines]))
    await asyncio.sleep(NO_END_S)


async def linger(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A body that nobody wants, and that does not come."""
    writer.write(_head(100_000).replace(b"application/json", b"text/plain") + b"{")
    await asyncio.sleep(NO_END_S)


async def just_large(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """A whole body that is just too large to be small."""
    data = json.dumps({"prompt": ["ab " * 80] * 260 + ["x" * 9000], "max_tokens": 1}).encode().ljust(66_000)
    writer.write(_head(len(data)) + data)
    await asyncio.sleep(NO_END_S)


async def garbage(writer: asyncio.StreamWriter, chance: random.Random) -> None:
    """What is no HTTP, or too much of it."""
    writer.write(chance.choice([chance.randbytes(200), b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, b"\r\n" * 50]))
    await asyncio.sleep(NO_END_S)


KINDS: Final[Mapping[str, _Attack]] = {
    "silent": silent,
    "slow_head": slow_head,
    "slow_body": slow_body,
    "half_body": half_body,
    "unread": unread,
    "giant": giant,
    "bomb": bomb,
    "crumbs": crumbs,
    "many_lines": many_lines,
    "linger": linger,
    "just_large": just_large,
    "garbage": garbage,
}


async def attack(url: str, plan: Mapping[str, int], over: asyncio.Event) -> dict[str, dict[str, int]]:
    """Attack until it is over, and hear the last ones out. How often they came and what they heard, by kind."""
    heard: dict[str, Counter[str]] = {kind: Counter() for kind in plan}
    tasks = {
        asyncio.create_task(_again(url, kind, heard[kind], random.Random(f"{kind} {number}"), over)): kind
        for kind, times in plan.items()
        for number in range(times)
    }
    await over.wait()
    for task, kind in tasks.items():
        if kind not in _HEARD_OUT:
            task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    return {kind: dict(counted) for kind, counted in heard.items()}


async def _again(url: str, kind: str, heard: Counter[str], chance: random.Random, over: asyncio.Event) -> None:
    """One attacker, who comes again and again, until it is over."""
    parts = urlsplit(url)
    await asyncio.sleep(chance.random() * 2)
    while not over.is_set():
        heard["came"] += 1
        try:
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 12)
        except OSError:
            heard["no connection"] += 1
            await asyncio.sleep(_DRIP_S)
            continue
        try:
            heard[await _heard(kind, reader, writer, chance)] += 1
        finally:
            writer.transport.abort()
        await asyncio.sleep(_AGAIN_S)


async def _heard(kind: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, chance: random.Random) -> str:
    """What a server says to one attack."""
    doing = asyncio.create_task(KINDS[kind](writer, chance))
    hearing = asyncio.create_task(_status(reader, reads=kind != "unread", stays=kind == "linger"))
    try:
        done, _ = await asyncio.wait({doing, hearing}, timeout=NO_END_S, return_when=asyncio.FIRST_COMPLETED)
        if doing in done and hearing not in done and kind != "unread":  # the answer may be on its way
            done, _ = await asyncio.wait({hearing}, timeout=_DRIP_S)
        if not done:
            return NO_END
        return hearing.result() if hearing in done else "cut"
    finally:
        for task in (doing, hearing):
            task.cancel()
        await asyncio.wait({doing, hearing})
        for task in (doing, hearing):
            if not task.cancelled():
                task.exception()  # a connection that was cut, mostly


async def _status(reader: asyncio.StreamReader, *, reads: bool, stays: bool) -> str:
    """The status of an answer; `cut` if the connection is closed without one. Who `stays` waits until it is closed."""
    if not reads:
        await asyncio.sleep(10 * NO_END_S)
    with suppress(OSError, ValueError):
        words = (await reader.readline()).split(b" ")
        while stays and await reader.read(1 << 12):
            pass
        if len(words) > 1:
            return words[1].decode("latin-1")
    return "cut"


def main() -> None:
    """Attack until standard input ends; say what came of it."""

    async def until_told() -> dict[str, dict[str, int]]:
        over = asyncio.Event()
        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), over.set)
        return await attack(sys.argv[1], json.loads(sys.argv[2]), over)

    sys.stdout.write(json.dumps(asyncio.run(until_told())) + "\n")


if __name__ == "__main__":
    main()
