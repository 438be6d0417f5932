"""Run a language model on a batch, in one process: checkpoint, decoder, sequences, batcher, sampler, `Engine`."""
