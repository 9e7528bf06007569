"""The reference engine, small enough for one head: models, attention on paged planes, scheduling."""
