"""Terms of the local loss that go with every method, and what they remember of earlier tasks."""
