"""Matrices of few bits: what they are, and their products on a GPU. A CPU's are kernels/cpu/packed.py."""
