"""How tokens reach the ranks that hold their experts, and how the results come back: one module a strategy."""
