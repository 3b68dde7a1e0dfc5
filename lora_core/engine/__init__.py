"""Continuous batching: requests, blocks, scheduler, attention, sampler, and the engine that steps them."""
