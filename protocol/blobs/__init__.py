"""Large values that are named by their digest: the tensor file, the store of a machine, the download of one blob."""
