"""From options to a server that answers: the socket first, then the model and its tiers, then a line that can be tried.

A machine without a model gets a tiny one with random weights, made once. Nothing is downloaded.
"""

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import Final

from headwater.build import open_engine
from headwater.config import ServeConfig
from headwater.core.errors import InvalidConfig
from headwater.serve.server import Server, address, listen
from headwater.serve.service import Service

log = logging.getLogger("headwater")

TINY: Final = "tiny-llama"


def run(config: ServeConfig, *, any_port: bool, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it. Blocks. With `any_port`, on a free port if `config.port` is taken.

    `say` hears, when it answers, where it is and a command that tries it.
    """
    with listen(config.host, config.port, or_any=any_port) as listener:
        if config.api_key is None and not _is_loopback(listener.getsockname()[0]):
            log.warning("everybody who can reach %s can use this server: it wants no API key", config.host)
        log.info("loading %s", config.model)
        with open_engine(config) as running:
            service = Service(running, config)
            log.info(
                "%s on %s: %d tokens a request, cached in %s",
                running.name,
                running.engine.model.device,
                running.engine.max_tokens,
                ", ".join(service.tiers) if config.cache else "nothing: --no-cache",
            )

            def announce() -> None:
                say(f"{running.name} answers on {address(listener)}/v1")
                say(_curl(address(listener), running.name, with_key=config.api_key is not None))

            Server(service, announce=announce).serve_forever([listener])


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


def _curl(url: str, model: str, *, with_key: bool) -> str:
    body = json.dumps({"model": model, "prompt": "Once upon a time", "max_tokens": 16})
    key = ' -H "Authorization: Bearer $HEADWATER_API_KEY"' if with_key else ""
    quoted = body.replace("'", "'\\''")
    return f"curl {url}/v1/completions -H 'Content-Type: application/json'{key} -d '{quoted}'"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
