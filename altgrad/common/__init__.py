"""Files, errors, processes and commands. Every package may import this one, and it imports no other package."""
