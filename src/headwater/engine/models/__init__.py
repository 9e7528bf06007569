"""What computes: one file per family of models, and the layers they share."""
