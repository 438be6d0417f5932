"""A decoder's operations: C++ on a CPU, Triton and torch's products on a GPU, and plain torch as their oracle."""
