"""Spans to an OpenTelemetry collector, over HTTP. Needs the extra `traces`.

Who makes spans never waits: they lie in a bounded queue, a thread of the SDK sends them, and what does not fit is
dropped. A collector that hangs or is gone costs traces and nothing else; `close` waits for it for `_CLOSE_S` at most.
Which requests are traced is said by who calls us (the sampled flag of `traceparent`), or else by the SDK's own
variables (`OTEL_TRACES_SAMPLER`).
"""

import logging
import threading
import time
from typing import Final

from headwater.core.errors import needs_extra
from headwater.core.version import __version__
from headwater.tracing.spans import Attributes, Span

with needs_extra("traces"):
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Span as ApiSpan
    from opentelemetry.trace import SpanKind, StatusCode, Tracer, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

_PATH: Final = "/v1/traces"
_EXPORT_S: Final = 5.0
_CLOSE_S: Final = 3.0
_MOST_QUEUED: Final = 8192
_BATCH: Final = 512
_MOST_FOLLOWED: Final = 65536  # requests; far more than a server takes
_PARENT: Final = "traceparent"
_wire: Final = TraceContextTextMapPropagator()


class OtelTracing:
    """Makes spans and sends them. Calls may come from any thread."""

    def __init__(self, url: str, *, service: str, instance: str, exporter: SpanExporter | None = None) -> None:
        """`url` is the collector's, http://HOST:4318. `exporter` sends in place of HTTP."""
        resource = Resource.create(
            {"service.name": service, "service.instance.id": instance, "service.version": __version__}
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = exporter or OTLPSpanExporter(endpoint=f"{url}{_PATH}", timeout=_EXPORT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(exporter, max_queue_size=_MOST_QUEUED, max_export_batch_size=_BATCH)
        )
        self._tracer = self._provider.get_tracer("headwater", __version__)
        self._followed: dict[str, OtelSpan] = {}
        for name in ("exporter", "sdk", "trace"):  # a line for each try, or each odd header, would be all the log
            logging.getLogger(f"opentelemetry.{name}").setLevel(logging.ERROR)

    def begin(self, name: str, *, at_s: float, traceparent: str) -> "OtelSpan":
        """See `Tracing`."""
        context = _wire.extract({_PARENT: traceparent}) if traceparent else None
        return OtelSpan(self._tracer, name, context, at_s, kind=SpanKind.SERVER)

    def follow(self, request: str, span: Span) -> None:
        """See `Tracing`."""
        if isinstance(span, OtelSpan) and len(self._followed) < _MOST_FOLLOWED:
            self._followed[request] = span

    def forget(self, request: str) -> None:
        """See `Tracing`."""
        self._followed.pop(request, None)

    def span_of(self, request: str) -> "OtelSpan | None":
        """What is followed."""
        return self._followed.get(request)

    def close(self) -> None:
        """Send what there is, as far as that can be done in `_CLOSE_S`. Idempotent."""
        thread = threading.Thread(target=self._provider.shutdown, name="headwater traces", daemon=True)
        thread.start()
        thread.join(_CLOSE_S)


class OtelSpan:
    """A span."""

    def __init__(
        self,
        tracer: Tracer,
        name: str,
        parent: Context | None,
        at_s: float,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> None:
        self._tracer = tracer
        self._span: ApiSpan = tracer.start_span(
            name, parent, kind=kind, attributes=attributes, start_time=_on_the_wall(at_s)
        )
        self._below = set_span_in_context(self._span)
        self._over = False

    @property
    def traceparent(self) -> str:
        """See `Span`."""
        said: dict[str, str] = {}
        _wire.inject(said, self._below)
        return said.get(_PARENT, "")

    def child(self, name: str, *, at_s: float, attributes: Attributes | None = None) -> "OtelSpan":
        """See `Span`."""
        return OtelSpan(self._tracer, name, self._below, at_s, attributes=attributes)

    def tell(self, attributes: Attributes) -> None:
        """See `Span`."""
        self._span.set_attributes(attributes)

    def fail(self, why: str) -> None:
        """See `Span`."""
        self._span.set_attribute("error.type", why)
        self._span.set_status(StatusCode.ERROR, why)

    def end(self, at_s: float) -> None:
        """See `Span`."""
        if not self._over:
            self._over = True
            self._span.end(_on_the_wall(at_s))


def _on_the_wall(at_s: float) -> int:
    """A time of the monotonic clock as nanoseconds since 1970. The two clocks are compared anew: one may be set."""
    return time.time_ns() - time.monotonic_ns() + int(at_s * 1e9)
