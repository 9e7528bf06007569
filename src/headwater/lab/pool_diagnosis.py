"""Why a Mooncake pool does not answer, in a few seconds, whatever the pool does.

Ports are knocked at from here. Everything that goes through the engine, whose calls may block with the GIL held, is
tried in a process of its own, which says how far it came and is ended when its time is up: `python -m
headwater.lab.pool_diagnosis URL` prints one JSON line for each step. Writes one small page under a prefix of its own,
reads it back, compares it, removes it.
"""

import dataclasses
import http.client
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from headwater.core.errors import HeadwaterError, InvalidConfig
from headwater.core.results import Status
from headwater.lab.finding import FAIL, OK, WARN, Check
from headwater.layout.frame import PageMeta, frame_bytes, seal, verify
from headwater.layout.spec import opaque_layout
from headwater.storage.base import Deadline
from headwater.storage.mooncake import MooncakeStore
from headwater.storage.mooncake.config import P2P, MooncakeConfig, address, parse_url
from headwater.storage.mooncake.watch import knock

_KNOCK_S: Final = 0.5
_PROBE_S: Final = 8.0
_CALL_S: Final = 3.0
_PLANES: Final = (4096, 1000)
_NO_MEMORY: Final = "no client gives the pool memory, or all of it is in use"


def diagnose(url: str) -> list[Check]:
    """Look at the pool of a `mooncake://` URL, and try it. Blocks for about ten seconds at most. Raises nothing."""
    try:
        config = parse_url(url)
    except InvalidConfig as error:
        return [Check("pool address", FAIL, str(error), "`headwater pool up` prints one for this machine")]
    findings = [*_ports(config), *_metadata(config)]
    reachable = all(finding.state == OK for finding in findings)
    return [*findings, *_probe(url, only_load=not reachable)]


def _ports(config: MooncakeConfig) -> Iterator[Check]:
    hints = {
        "pool master": "start one (`headwater pool up`), or mend the address; all clients wait for it",
        "pool client": "it shares its memory with this machine's processes: `headwater pool up`, or leave shm out",
    }
    for (name, hint), where in zip(hints.items(), (config.master, config.shm), strict=True):
        if where is not None:
            trouble = knock(*address(name, where), _KNOCK_S)
            yield Check(name, OK, f"answers at {where}") if trouble is None else Check(name, FAIL, trouble, hint)


def _metadata(config: MooncakeConfig) -> Iterator[Check]:
    name, where = "pool metadata", urlsplit(config.metadata)
    if config.metadata == P2P or where.scheme != "http" or config.shm is not None:
        return
    hint = "all clients of a pool name the same metadata server; without one: leave metadata out, everywhere"
    line = http.client.HTTPConnection(where.hostname or "", where.port, timeout=_KNOCK_S)
    try:
        line.request("GET", f"{where.path}?key=headwater")
        line.getresponse().read()
    except (OSError, http.client.HTTPException) as error:
        yield Check(name, FAIL, f"{config.metadata}: {error}", hint)
    else:
        yield Check(name, OK, f"answers at {config.metadata}")
    finally:
        line.close()


def _probe(url: str, *, only_load: bool) -> list[Check]:
    command = [sys.executable, "-m", "headwater.lab.pool_diagnosis", url, *(["--only-load"] if only_load else [])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)  # noqa: S603  ours
    with child:
        try:
            printed, _ = child.communicate(timeout=_PROBE_S)
            hung = False
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            hung = True
    findings = [Check(**json.loads(line)) for line in printed.splitlines() if line.startswith("{")]
    if hung:
        hint = "a server is stopped or overloaded, or a port for transfers is closed between the machines"
        findings.append(Check("pool page", FAIL, f"did not come back within {_PROBE_S:.0f} s", hint))
    elif child.returncode:
        findings.append(Check("pool engine", FAIL, f"it ended with {child.returncode}", "see `headwater pool status`"))
    return findings


# --- in the process of its own ----------------------------------------------------------------------------------------


def _try(url: str) -> Iterator[Check]:
    """Join, write a page, read it back."""
    config = dataclasses.replace(parse_url(url), prefix=f"headwater-doctor:{secrets.token_hex(8)}:", segment_bytes=0)
    try:
        store = MooncakeStore(config)
    except HeadwaterError as error:
        hint = "the master answers: look at metadata, protocol, device and local in the URL"
        yield Check("pool engine", FAIL, str(error), hint)
        return
    yield Check("pool engine", OK, f"joined by {'shared memory' if config.shm else config.protocol}")
    page, frame = _page()
    put = store.put([(page.name, frame)], deadline=Deadline.after(_CALL_S))[0]
    if put is Status.NO_ROOM and parse_url(url).segment_bytes:
        yield Check("pool page", WARN, f"not tried: {_NO_MEMORY}", "who uses this address gives some itself (segment)")
    elif put is Status.NO_ROOM:
        yield Check("pool page", FAIL, _NO_MEMORY, "`headwater pool up` starts one; or say segment=2GiB in the URL")
    elif put is not Status.STORED:
        hint = "whose memory it would lie in does not answer: a process that ended, or a closed port"
        yield Check("pool page", FAIL, f"writing one ended as {put}", hint)
    else:
        back = memoryview(bytearray(len(frame)))
        got = store.get_into([(page.name, back)], deadline=Deadline.after(_CALL_S))[0]
        intact = got is Status.HIT and not isinstance(verify(back, page.name, now_ms=0), Status) and back == frame
        if intact:
            yield Check("pool page", OK, "written, read back and equal")
        else:
            said = "came back with other bytes" if got is Status.HIT else f"reading it ended as {got}"
            yield Check("pool page", FAIL, said, "do not use this pool")
    store.delete([page.name], deadline=Deadline.after(_CALL_S))


def _page() -> tuple[PageMeta, memoryview]:
    layout = opaque_layout(_PLANES, block_tokens=16)
    meta = PageMeta(key=os.urandom(32), identity=bytes(32), parent=os.urandom(32), depth=0, valid_tokens=16)
    frame = memoryview(bytearray(os.urandom(frame_bytes(_PLANES))))
    seal(frame, meta, layout, now_ms=0)
    return meta, frame


def _load_only() -> Iterator[Check]:
    from headwater.storage.mooncake.engine import load

    try:
        load()
    except HeadwaterError as error:
        yield Check("pool engine", FAIL, str(error))
    else:
        yield Check("pool engine", OK, "installed")


def main() -> None:
    """Try the pool named by the first argument; one JSON line for each step, as soon as it is known."""
    steps = _load_only() if "--only-load" in sys.argv[2:] else _try(sys.argv[1])
    for finding in steps:
        sys.stdout.write(json.dumps(dataclasses.asdict(finding)) + "\n")
        sys.stdout.flush()
    os._exit(0)  # closing the engine may take long, and nobody needs it


if __name__ == "__main__":
    main()
