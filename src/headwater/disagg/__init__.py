"""Prefill here, decode there: what one instance writes to the pool for another, and the ticket that says so."""
