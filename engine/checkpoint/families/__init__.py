"""The families of models of the native decoder."""
