"""A small GPT: its text, training through octavo.torch.attention, and sampling through the paged cache."""
