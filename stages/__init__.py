"""The stages of the pipeline, one script each: read, call, write."""
