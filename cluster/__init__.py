"""The fleet: which adapters are wanted, where each one runs, and the demo that ships with it."""
