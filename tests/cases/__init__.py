"""Known faults of multi-LoRA servers as cases: each row drives the real code and says what it got.

`python -m tests.cases` prints the table; pytest runs the same rows one by one.
"""
