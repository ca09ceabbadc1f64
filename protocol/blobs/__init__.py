"""Large values that go by their digest: the tensor file, the store of a machine, the download of one blob."""
