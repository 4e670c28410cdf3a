"""``QuantizedLinear`` and its parts; a package, so that ``altgrad.model`` has the layer apart from what uses it."""
