"""Llama's decoder in PyTorch on Octavo's operators: the parts of examples/llama_decode.py."""
