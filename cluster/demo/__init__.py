"""A demo that needs no model hub: one small base model and three adapters trained on it."""
