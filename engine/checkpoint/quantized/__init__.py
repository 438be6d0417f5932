"""Quantized checkpoints in .safetensors files: a reader for each `quant_method`, behind one door (scheme.py)."""
