"""SmolLM2 on a paged KV cache: the parts of examples/generate.py."""
