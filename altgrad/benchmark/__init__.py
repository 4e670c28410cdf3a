"""What a machine can do, ``make bench``, and on a GPU ``make gpu``: checks and timings in order of worth.

A GPU is rented by the hour or lent for minutes. So nothing is installed, nothing needs a network, each result is
written as soon as it is there, and what is there is not measured again.
"""
