"""SmolLM2-135M-Instruct on a paged KV cache, with NumPy, PyTorch or CuPy."""
