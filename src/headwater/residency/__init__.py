"""Who in the cluster holds which prefix, in which tier: what each node says, and the index that hears it."""
