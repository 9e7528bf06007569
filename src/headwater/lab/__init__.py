"""What measures and proves: benchmarks, proofs, campaigns, replays. Shipped; no product room imports it."""
