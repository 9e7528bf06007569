"""Bytes at rest: one interface (`base.py`), one file per engine, wrappers for what cuts across them."""
