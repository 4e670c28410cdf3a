"""Small floating-point formats: their definition, the formats that have a name, and a format's card.

The package imports numpy and no torch. ``python -m altgrad.formats E3M4`` prints a card.
"""

from altgrad.formats.floats import SPECIALS, FloatFormat, default_bias
from altgrad.formats.format import SCALE_FORMATS, Format
from altgrad.formats.registry import UnknownFormatError, definition, format_names, from_definition, get_format
from altgrad.formats.tables import TableFormat

__all__ = [
    "SCALE_FORMATS",
    "SPECIALS",
    "FloatFormat",
    "Format",
    "TableFormat",
    "UnknownFormatError",
    "default_bias",
    "definition",
    "format_names",
    "from_definition",
    "get_format",
]
