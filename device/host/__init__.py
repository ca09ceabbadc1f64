"""What a machine has for its devices: processors, memory, open files."""
