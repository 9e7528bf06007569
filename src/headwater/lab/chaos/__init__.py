"""`headwater chaos`: nodes, pool and pages break under load."""
