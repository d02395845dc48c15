# What nanobind's stub generator leaves out: names that it takes for another module's, and dunders.
_core.__suffix__:
    __version__: str

    class OutOfPages(RuntimeError):
        indices: tuple[int, ...]

    class InvalidSequence(ValueError): ...
