"""Training's results to the bit: a miniature grid whose digests are committed (`make golden`).

A change that should alter no result leaves all of them as they are: `python -m tests.golden` says which differ.
"""
