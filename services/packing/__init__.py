"""Pure numpy functions: bins, balance over data ranks, and the grids made from them."""
