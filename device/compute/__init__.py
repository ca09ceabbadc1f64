"""The trainer process: it does the numerical work for the devices of a machine."""
