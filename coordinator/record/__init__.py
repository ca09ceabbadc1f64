"""The record of a run on disk: how it is written, and how it is read."""
