"""Which prefix do we know, in which device slot: counting only."""
