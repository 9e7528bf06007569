"""The brain: what to keep, where, and what to do next."""
