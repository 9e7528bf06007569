"""RedisStore: pages in a Redis server, with the protocol and the connections that it needs."""

from headwater.storage.redis.store import RedisStore

__all__ = ["RedisStore"]
