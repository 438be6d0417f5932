"""A decoder's operations: in C++ on a CPU, in Triton beside torch's products on a GPU, in torch as their oracle."""
