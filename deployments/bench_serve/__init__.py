"""`lora-fleet bench serve`: a load of many adapters on any OpenAI-style server, and what its users would see.

settings -> catalogue -> prompts, arrivals -> plan -> traffic (exchange by exchange) -> summary -> table, JSON, plots
"""
