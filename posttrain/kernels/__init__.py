"""Kernels for CPU and CUDA; each has an equivalent in torch, which is used elsewhere and compared with in tests."""
