"""From options to a server that answers: the socket first, then the model and its tiers, then a line that can be tried.

A machine without a model gets a tiny one with random weights, made once. Nothing is downloaded.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from headwater.build import open_engine
from headwater.config.checks import is_loopback
from headwater.config.serve import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.core.role import Role
from headwater.disagg.heartbeat import Heartbeat, NodeLoad, Rates
from headwater.serve.heartbeats import HeartbeatSender
from headwater.serve.limits import fit_connections, limits_of
from headwater.serve.readers import spare_readers
from headwater.serve.server import Server
from headwater.serve.service import Service
from headwater.serve.sockets import address, curl, keep_what_is_here, listen

log = logging.getLogger("headwater")

TINY: Final = "tiny-llama"


def run(config: ServeConfig, *, any_port: bool, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. Blocks. With `any_port`, on a free port if `config.port` is taken.

    `say` hears, when it answers, where it is and a command that tries it.
    """
    with listen(config.host, config.port, or_any=any_port) as listener:
        if config.api_key is None and not is_loopback(listener.getsockname()[0]):
            log.warning("everybody who can reach %s can use this server: it wants no API key", config.host)
        log.info("loading %s", config.model)
        with spare_readers() as spares, open_engine(config) as running:
            fits = fit_connections(config.max_connections)
            bound = listener.getsockname()[0]
            service = Service(
                running,
                config,
                limits_of(config, bound=bound, max_connections=fits),
                url=config.advertise or address(listener),
            )
            log.info(
                "%s on %s: %d tokens a request, cached in %s",
                running.name,
                running.engine.model.device,
                running.engine.max_tokens,
                ", ".join(service.tiers) if config.cache else "nothing: --no-cache",
            )

            def announce() -> None:
                service.readers.start(spares)
                keep_what_is_here()
                if config.role is Role.MIXED:
                    say(f"{running.name} answers on {address(listener)}/v1")
                    say(curl(address(listener), running.name, with_key=config.api_key is not None))
                else:
                    say(f"{running.name} is a {config.role} node on {address(listener)}")

            if config.role is not Role.MIXED and not config.routers:
                log.warning("no router is told of this %s node (--router): whoever wants it must call it", config.role)
            Server(service, beats=heartbeats(service), announce=announce).serve_forever([listener])


def heartbeats(service: Service) -> HeartbeatSender | None:
    """What a node tells its routers; None if it has none."""
    config, running = service.config, service.running
    if not config.routers:
        return None
    engine = running.engine
    epoch = time.time_ns() // 1_000_000

    def beat(lease_s: float) -> Heartbeat:
        running_now, waiting, free = engine.load
        free = min(free, service.num_free)
        if config.role is Role.DECODE:  # it lets nobody wait: who finds no slots is sent away
            free = min(free, max(0, config.max_running - running_now))
        prefill, decode, pool = engine.rates
        return Heartbeat(
            node=service.node,
            url=service.url,
            role=config.role,
            model=running.name,
            identity=engine.model.identity.digest.hex(),
            block_tokens=engine.model.block_tokens,
            layout=engine.model.layout.fingerprint.hex(),
            lease_s=lease_s,
            epoch=epoch,
            max_model_len=engine.max_tokens,
            max_answers=config.max_running if config.role is Role.DECODE else engine.max_requests,
            draining=service.stopping or service.draining or not engine.alive,
            clock_s=time.time(),
            load=NodeLoad(running=running_now, waiting=waiting, free_slots=free),
            rates=Rates(prefill_tokens_per_s=prefill, decode_tokens_per_s=decode, pool_tokens_per_s=pool),
        )

    return HeartbeatSender(config.routers, beat, lease_s=config.lease_s, key=config.node_key)


def tiny_model(base: Path) -> Path:
    """The directory of a tiny model under `base`, made if need be; another process may make it at the same time."""
    from headwater.engine.make_model import make_model  # loads torch

    final = base / "models" / TINY
    if (final / "config.json").is_file():
        return final
    if final.exists():
        raise InvalidConfig(f"{final} is there and holds no model: remove it, or name one with --model")
    base.mkdir(mode=0o700, parents=True, exist_ok=True)  # as a store makes it, which may come to lie there
    final.parent.mkdir(mode=0o700, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{TINY}-", dir=final.parent))
    try:
        made = make_model("llama", making)
        try:
            os.rename(making, final)  # complete, or not there
        except OSError:
            if not (final / "config.json").is_file():  # not because somebody else was faster
                raise
        log.info("no --model was given: a tiny one of %d random parameters is in %s", made.num_parameters, final)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return final
