"""Headers and paths that clients, routers and nodes say to each other: each has its name here, once."""

from typing import Final

REQUEST_ID: Final = "x-request-id"  # of a client's request, the same on all its ways
ATTEMPT: Final = "x-headwater-attempt"  # which of a router's tries for it this is
TIMEOUT: Final = "x-headwater-timeout-s"  # that is left for it
SESSION_ID: Final = "x-session-id"  # whose turn it is, where the body does not say it
POOL_SECONDS: Final = "x-headwater-pool-s"  # that it waited for the pool
FIRST_SECONDS: Final = "x-headwater-first-s"  # until its first token
TRACEPARENT: Final = "traceparent"  # of a trace that the request is part of, as W3C has it

ENDPOINTS: Final = ("/v1/completions", "/v1/chat/completions")  # of OpenAI, that generate
MODELS: Final = "/v1/models"
HEALTH: Final = "/health"
METRICS: Final = "/metrics"
REQUESTS: Final = "/admin/requests"  # why the last ones hit or missed
FLEET: Final = "/pd/"  # what follows is for who holds the fleet's key; `router/router.py` says what each is for
PREFILL: Final = "/pd/prefill"
DECODE: Final = "/pd/decode"
ATTEMPTS: Final = "/pd/attempts"
NODES: Final = "/pd/nodes"
DRAIN: Final = "/pd/drain"
