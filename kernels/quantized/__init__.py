"""Matrices of few bits (`Quantized`), and their products on a GPU. For a CPU see kernels/cpu/packed.py."""
