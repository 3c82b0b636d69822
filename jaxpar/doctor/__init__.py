"""What a machine has: its devices and links, what is installed, and whether every strategy runs there as on a CPU."""
