"""Request traces in virtual time, through the production brain: what would be hit, without a byte and without waiting.

What runs is `cache.state.Brain` with its index, slots and policies, told the events that an engine tells it. Not here:
bytes, devices, threads, real time; and no policy, but the clairvoyant bound (`belady.py`) that none can beat.
"""
