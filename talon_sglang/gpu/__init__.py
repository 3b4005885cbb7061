"""The way to draft on a GPU: fixed shapes, no host synchronisation, CUDA graphs. docs/gpu.md says what of it has run where."""
