"""The server of the federation: roster, asks, rounds, reduction, evaluation, checkpoint."""
