"""What a machine can do, ``make bench``: training steps beside an unquantized one, their memory and compile
time, one quantization beside its peers, and what the pipeline itself costs, beside the machine's limits.
"""
