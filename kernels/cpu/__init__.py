"""The CPU's kernels, in C++ behind a C interface, and the launchers that give them tensors."""
