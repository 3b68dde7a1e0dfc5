"""The LoRA core: adapters, slots, layers, and the engine that decodes through them."""
