"""What files, errors, processes and commands need, and every package may import. It imports no other package."""
