"""Spans of requests and of the cache's jobs, for OpenTelemetry. Off unless somebody names a collector.

`spans` is what servers and routers call, and next to nothing while tracing is off; `otel` sends spans (the extra
`traces`); `jobs` makes spans of what a brain hears and says.
"""
