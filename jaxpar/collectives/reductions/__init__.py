"""How the partial results of ranks are added up after each sublayer: one module a strategy."""
