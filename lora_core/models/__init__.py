"""The decoder, its declared architectures, and the reading of checkpoints into it."""
