"""The stages of the pipeline, one script each: it reads files, calls a package, writes files."""
