"""The executors: they run a program for one device after another, or for many devices in a stack."""
