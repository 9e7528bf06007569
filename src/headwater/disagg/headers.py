"""Headers that clients, routers and nodes say to each other besides HTTP's own: each has its name here, once."""

from typing import Final

REQUEST_ID: Final = "x-request-id"  # of a client's request, the same on all its ways
ATTEMPT: Final = "x-headwater-attempt"  # which of a router's tries for it this is
TIMEOUT: Final = "x-headwater-timeout-s"  # that is left for it
POOL_SECONDS: Final = "x-headwater-pool-s"  # that it waited for the pool
FIRST_SECONDS: Final = "x-headwater-first-s"  # until its first token
