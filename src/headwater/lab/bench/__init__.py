"""How fast, measured here and now: `index` (naming blocks), `store` (bytes at rest), each beside a plain baseline.

Every figure has its unit in its name and comes from several interleaved rounds, because machines are noisy; every
benchmark checks that what it read is right. Logic only: `cli/` draws the tables.
"""
