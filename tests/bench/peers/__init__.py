"""`make bench-peers`: other engines, each a process of its own that is asked for answers over pipes."""
