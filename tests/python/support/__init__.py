"""What the tests share: the oracle, cases, arrays of every library, and ways to call and to compare."""
