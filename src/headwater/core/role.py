"""What a node does for a request: one of three words, for configurations, heartbeats and choices."""

import enum


class Role(enum.StrEnum):
    """What a node does for a request."""

    PREFILL = "prefill"  # computes a prompt, hands its KV over, answers with a ticket
    DECODE = "decode"  # takes a ticket, fetches the KV, answers
    MIXED = "mixed"  # both, by itself
