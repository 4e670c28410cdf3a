"""Is the first cause that is named the fault that was planted? Counted by kind of fault."""
