"""Products in Triton with matrices of plain numbers, in one order, and with matrices of experts."""
