"""swiftapex: a small, readable research engine for hybrid CPU-GPU LLM inference."""
