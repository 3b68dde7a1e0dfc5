"""`lora-fleet doctor`: what this machine has, what a configuration needs of it, and whether the two fit."""
