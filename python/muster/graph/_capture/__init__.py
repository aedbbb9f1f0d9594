"""Calls of torch.distributed in forms that the compiler traces: operators, their shapes and their gradients."""
