"""What the machine at hand really does: rates of products and memory, latencies and bandwidths of collectives."""
