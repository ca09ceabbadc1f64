"""Random draws of models while they train: by keys, so that a step repeats them to the bit, alone and in a stack."""
