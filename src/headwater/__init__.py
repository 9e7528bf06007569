"""Headwater: a tiered, shared, verified KV cache for LLM serving.

Rooms, from the bottom up: `core` (vocabulary), `layout` (what a block's bytes look like), `policy` (who leaves first),
`storage` (bytes at rest), `transfer` (the hands that move bytes), `build` (introduces them), `cli` (the face).
"""

__version__ = "0.1.0"
