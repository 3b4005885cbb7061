"""TALON for SGLang: confidence-gated, budget-driven draft trees (arXiv 2601.07353) for any EAGLE-3 head."""

__version__ = "0.1.0"
