"""``QuantizedLinear`` and its parts, separate from the code in ``altgrad.model`` that uses the layer."""
