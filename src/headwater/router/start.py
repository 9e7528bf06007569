"""From options to a router that answers: the socket first, then the index it asks, then a line that can be tried.

With a residency index the router wants to know who holds a prompt, so it needs the prompt in tokens: those of clients
that send tokens it has, for text it needs the model's tokenizer (`--model`). What it cannot read is routed by load and
speed alone, and so is a text that would take too long: one in a large body, or one that a chat template makes large.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from headwater.build import open_residency
from headwater.config.checks import is_loopback, require_url
from headwater.config.environment import default_node
from headwater.config.residency import MEMORY_URL, ResidencyConfig
from headwater.config.serve import require_node_key
from headwater.core.errors import InvalidConfig, InvalidInput
from headwater.disagg.prompt import Asking
from headwater.engine.tokenizer import Tokenizer
from headwater.metrics import Metrics
from headwater.router.lookup import PrefixLookup
from headwater.router.router import Router
from headwater.router.server import RouterServer, router_limits
from headwater.router.settings import RouterConfig
from headwater.serve.asked import Messages, salt_of
from headwater.serve.body import Fields
from headwater.serve.errors import ApiError
from headwater.serve.limits import MAX_CONNECTIONS, SMALL_BYTES, fit_connections
from headwater.serve.prompts import encode
from headwater.serve.reading import APIS, LargeBody
from headwater.serve.sockets import address, curl, keep_what_is_here, listen
from headwater.tracing.spans import NO_TRACING, Tracing

log = logging.getLogger("headwater")

Read = Callable[[str, Mapping[str, object]], Asking | None]


def run(
    config: RouterConfig,
    *,
    host: str,
    port: int,
    any_port: bool,
    residency: str | None,
    model: Path | None,
    traces: str | None = None,
    max_connections: int = MAX_CONNECTIONS,
    allowed_hosts: Sequence[str] = (),
    say: Callable[[str], None],
) -> None:
    """Route until a signal ends it. Blocks. With `any_port`, on a free port if `port` is taken.

    `say` hears, when it answers, where it is and a command that tries it.
    """
    require_node_key(config.node_key, host)
    if traces is not None:
        require_url("--traces", traces)
    with (
        _tracing(traces) as tracing,
        listen(host, port, or_any=any_port) as listener,
        open_router(config, residency=residency, model=model, tracing=tracing) as one,
    ):
        if config.api_key is None and not is_loopback(listener.getsockname()[0]):
            log.warning("everybody who can reach %s can use this router: it wants no API key", host)

        fits = fit_connections(max_connections, other_files=config.max_requests)  # each asks a node
        bound = listener.getsockname()[0]

        def announce() -> None:
            server.start_readers()
            keep_what_is_here()
            say(f"the router answers on {address(listener)}/v1")
            say(curl(address(listener), with_key=config.api_key is not None))

        limits = router_limits(config, bound=bound, max_connections=fits, allowed_hosts=allowed_hosts)
        server = RouterServer(one, limits=limits, announce=announce)
        server.serve_forever([listener])


@contextmanager
def _tracing(url: str | None) -> Iterator[Tracing]:
    """Spans to that collector; none without one."""
    if url is None:
        yield NO_TRACING
        return
    from headwater.tracing.otel import OtelTracing  # an extra

    tracing = OtelTracing(url, service="headwater-router", instance=default_node())
    try:
        yield tracing
    finally:
        tracing.close()


@contextmanager
def open_router(
    config: RouterConfig,
    *,
    residency: str | None = None,
    model: Path | None = None,
    metrics: Metrics | None = None,
    tracing: Tracing = NO_TRACING,
) -> Iterator[Router]:
    """A router that asks an index, if there is one. Whoever serves it closes it; the index is closed at the end."""
    metrics = metrics if metrics is not None else Metrics()
    if residency is None:
        if model is not None:
            raise InvalidConfig("a model's tokenizer is for the residency index: say where that is, or leave it out")
        yield Router(config, metrics=metrics, tracing=tracing)
        return
    if residency == MEMORY_URL:
        raise InvalidConfig(f"an index in this process ({MEMORY_URL}) hears of no node: name one that nodes use too")
    read = reader(model)
    with open_residency(ResidencyConfig(url=residency), metrics=metrics) as index:
        router: Router
        lookup = PrefixLookup(index, read=read, blocks=lambda: router.nodes.blocks())
        router = Router(config, metrics=metrics, lookup=lookup, tracing=tracing)
        yield router


def reader(model: Path | None) -> Read:
    """What turns bodies into tokens: all of them with a model's directory, without one those that hold tokens."""
    tokenizer = None
    if model is None:
        log.warning("prompts that are text are routed without the index: name a model's directory (--model)")
    else:
        tokenizer = Tokenizer.load(model)

    def read(endpoint: str, body: Mapping[str, object]) -> Asking | None:
        if isinstance(body, LargeBody):
            return body.asking
        api, fields = APIS[endpoint], Fields(body)  # of which only the prompt matters here: nodes know the rest
        try:
            prompt = api.prompts(fields)[0]
            if isinstance(prompt, list):
                tokens = prompt
            elif tokenizer is not None:
                added = fields.flag("add_special_tokens", default=not isinstance(prompt, Messages))
                tokens = encode(tokenizer, api, prompt, add_special_tokens=added, max_chars=SMALL_BYTES)
            else:
                return None
            return Asking(tokens, salt_of(fields))
        except (ApiError, InvalidInput):  # a node will say what is wrong with it
            return None

    return read
