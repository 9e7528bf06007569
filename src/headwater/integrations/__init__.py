"""Other people's engines on our cache. Each is an adapter: it decides nothing and moves nothing itself."""
