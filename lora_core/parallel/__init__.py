"""One engine on several devices: which share of the model each has, and how they compute one step together."""
