"""Attention on paged planes: a backend declares its layout and computes on it; one file per family."""
