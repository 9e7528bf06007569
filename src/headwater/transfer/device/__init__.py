"""Memory of devices, and copies between it and the host's: arenas, the copy engine, wires, kernels, CUDA calls."""
